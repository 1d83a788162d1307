"""Conformance of a backend under layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend, Batch, Span
from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.backend_kit import BackendKit
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights.gguf import GGUFFile

PAGE = 8
#: Longer than what an indexer chooses, and several pages.
TOKENS = np.random.default_rng(7).integers(3, 384, 45).astype(np.int32)

MODELS: dict[str, Callable[[Path], Path]] = {
    "deepseek2": lambda path: tiny_family(path, architecture="deepseek2", seed=1, further=1),
    "qwen35": lambda path: tiny_hybrid(path, architecture="qwen35", seed=2, layers=2, further=1),
    "qwen4exp": lambda path: tiny_sparse(path, seed=3, layers=2, further=1),
}


class FurtherTests(BackendKit):
    """Guesses of tiny models' own layers on the backend against those on the numpy reference."""

    @pytest.mark.parametrize("name", MODELS)
    def test_hidden_rows_of_guesses_of_several_sequences(self, backend: Backend, tmp_path: Path, name: str) -> None:
        path = MODELS[name](tmp_path / "tiny.gguf")
        kv_type = "f32" if "f32" in backend.kv_types else backend.kv_types[0]
        expected = _hidden_rows(path, NumpyBackend(), kv_type)
        for found, rows in zip(_hidden_rows(path, backend, kv_type), expected, strict=True):
            self.close_to(found, rows, self.model_tolerance)


def _hidden_rows(path: Path, backend: Backend, kv_type: str) -> list[NDArray[np.float32]]:
    """Of two guesses behind each of two sequences, of which one was read in two steps."""
    families = Plugins.load(environ={}, entry_points=[]).families().values()
    model = load_model(GGUFFile.open(path), backend, families, ModelOptions(further=True))
    layer = model.further
    assert layer is not None
    runner = ModelRunner(model, backend, sequences=2, length=64, kv_type=kv_type, page_tokens=PAGE)
    runner.step([Rows(0, 0, TOKENS[:19])], [])
    runner.step([Rows(1, 0, TOKENS[:30]), Rows(0, 19, TOKENS[19:])], [])
    hidden, found = np.random.default_rng(8).standard_normal((2, layer.width)).astype(np.float32), []
    for ahead in range(2):  # the tokens are not the guesses: these would differ where two are as likely
        pages = 64 // PAGE
        spans = tuple(
            Span(start + ahead, 1, (np.arange(first, first + pages, dtype=np.int32),))
            for start, first in ((len(TOKENS), 0), (30, pages))
        )
        batch = Batch(TOKENS[ahead : ahead + 2].copy(), spans, np.arange(2, dtype=np.int32))
        _, hidden = layer.guess(batch, runner.stores[:1], hidden)
        found.append(hidden.copy())
    runner.close()
    return found
