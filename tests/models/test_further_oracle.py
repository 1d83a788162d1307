"""Drafts of tiny random models are those of the same layers put together from parts of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_core.compute.base import Backend, BackendOptions, Batch, Span
from strata_core.models.base import DraftLayer, ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.weights import open_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_further import Further
from parity import CASES, PAGE_TOKENS, TOKENS, TOLERANCE, Case

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

FURTHER = [case for case in CASES if case.name.split("-")[0] in
           ("deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")]  # fmt: skip


class Carrying:
    """A model whose every step goes on from the hidden row of the one before; of one sequence."""

    def __init__(self, model: Any):
        self._model = model
        self.layer: DraftLayer = model.further
        self.hidden = np.zeros((1, self.layer.width), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch, stores: Any) -> np.ndarray:
        logits, hidden = self.layer.forward(batch, stores, self.hidden)
        self.hidden = hidden[-1:].copy()
        return logits


def drafts(path: Path, backend: Backend, tokens: np.ndarray, chunk: int, count: int) -> list[np.ndarray]:
    """Logits of guesses behind a prompt that is read in chunks, all but its last token."""
    plugins = Plugins.load(environ={}, entry_points=())
    with open_model(path) as source:
        options = ModelOptions(further=True)
        model = Carrying(load_model(source, backend, plugins.families().values(), options))
        runner = ModelRunner(model, backend, length=96, kv_type="f32", page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
        for start in range(0, len(tokens) - 1, chunk):
            runner.step([Rows(0, start, tokens[start : min(start + chunk, len(tokens) - 1)])], [])
        found: list[np.ndarray] = []
        head = model.layer._predictor.logits  # type: ignore[attr-defined]

        def watched(b: Backend, hidden: Any) -> Any:
            logits = head(b, hidden)
            found.append(b.to_host(logits)[0])
            return logits

        model.layer._predictor = Watched(model.layer._predictor, watched)  # type: ignore[attr-defined]
        hidden, token, table = model.hidden, tokens[-1:], np.arange(96 // PAGE_TOKENS, dtype=np.int32)
        for position in range(len(tokens) - 1, len(tokens) - 1 + count):
            batch = Batch(token, (Span(position, 1, (table,)),), np.array([0], np.int32))
            token, hidden = model.layer.guess(batch, runner.stores[:1], hidden)
        runner.close()
        model.close()
        return found


class Watched:
    """A predictor with other logits."""

    def __init__(self, predictor: Any, logits: Any):
        self._predictor, self.logits = predictor, logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._predictor, name)


@pytest.fixture(scope="module", params=FURTHER, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    case: Case = request.param
    path = tmp_path_factory.mktemp(case.name) / "model"
    further = Further(case.save(path))
    further.save(path)
    return path, further.drafts(TOKENS, 4)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_logits_of_four_guesses_are_those_of_transformers(pair: tuple[Path, list[np.ndarray]], backend: str) -> None:
    path, expected = pair
    plugins = Plugins.load(environ={})
    if backend not in plugins.backends():
        pytest.skip(f"backend {backend} is not installed")
    made = plugins.choose_backend(backend).create(BackendOptions(1))
    found = drafts(path, made, TOKENS, 31, 4)
    made.close()
    assert np.abs(expected).max() > 1  # numbers worth comparing
    assert max(np.abs(ours - theirs).max() for ours, theirs in zip(found, expected, strict=True)) <= TOLERANCE
