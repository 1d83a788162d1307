"""Tiny random hybrid models give the logits of ``transformers``, however their prompts are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_hybrids import HYBRIDS, VOCAB, Hybrid, logits, saved  # noqa: E402

from strata_core.compute.reference import NumpyBackend  # noqa: E402
from strata_core.models.base import ModelOptions  # noqa: E402
from strata_core.models.load import load_model  # noqa: E402
from strata_core.plugins import Plugins  # noqa: E402
from strata_core.testing.runner import ModelRunner, Rows  # noqa: E402
from strata_core.weights import open_model  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

#: With the token that cuts n-grams (5) among them, also twice in a row.
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 83).astype(np.int32)
TOKENS[[20, 21, 44, 61]] = 5
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda hybrid: hybrid.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A runner of our model, and the logits of theirs."""
    hybrid: Hybrid = request.param
    path = tmp_path_factory.mktemp(hybrid.name)
    expected = logits(saved(hybrid, path), TOKENS)
    backend = NumpyBackend()
    families = Plugins.load(environ={}, entry_points=[]).families()
    with open_model(path) as source:
        model = load_model(source, backend, families.values(), ModelOptions())
    runner = ModelRunner(model, backend, sequences=3, length=96, kv_type="f32", page_tokens=8)
    yield runner, expected
    runner.close()
    model.close()


def test_logits_of_every_row(pair: tuple[ModelRunner, np.ndarray]) -> None:
    runner, expected = pair
    assert np.abs(expected).max() > 1  # numbers worth comparing
    assert np.abs(runner.logits(TOKENS) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 7, 19])
def test_reading_in_chunks(pair: tuple[ModelRunner, np.ndarray], chunk: int) -> None:
    runner, expected = pair
    assert np.abs(runner.last_logits(TOKENS, chunk) - expected[-1]).max() <= TOLERANCE


def test_beside_others(pair: tuple[ModelRunner, np.ndarray]) -> None:
    runner, expected = pair
    other = TOKENS[::-1].copy()
    runner.step([Rows(1, 0, other[:30])], [])
    runner.step([Rows(0, 0, TOKENS[:40]), Rows(1, 30, other[30:31])], [])
    last = len(TOKENS) - 40
    found = runner.step([Rows(1, 31, other[31:45]), Rows(0, 40, TOKENS[40:]), Rows(2, 0, other[:3])], [13 + last])
    assert np.abs(found[0] - expected[-1]).max() <= TOLERANCE


@pytest.mark.parametrize("position", [1, 24, 45])
def test_resumed_from_what_was_stored(pair: tuple[ModelRunner, np.ndarray], position: int) -> None:
    runner, expected = pair
    runner.step([Rows(0, 0, TOKENS[:position])], [])
    image = runner.image(0, position)
    runner.step([Rows(0, position, TOKENS[::-1][:20].copy())], [])  # goes on otherwise; what is stored stays
    runner.resume(2, image)
    rest = TOKENS[position:]
    found = runner.step([Rows(2, position, rest)], range(len(rest)))
    assert np.abs(found - expected[position:]).max() <= TOLERANCE
