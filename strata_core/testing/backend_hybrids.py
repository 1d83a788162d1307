"""Conformance of a backend under models with recurrent state and sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.backend_kit import BackendKit
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights.gguf import GGUFFile

#: Longer than what an indexer chooses, and several pages of 8; with the token that ends n-grams.
TOKENS = np.random.default_rng(6).integers(0, 384, 59).astype(np.int32)
TOKENS[[9, 30, 31]] = 0

MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3next": lambda path: tiny_hybrid(path, seed=1),
    "qwen35": lambda path: tiny_hybrid(path, seed=2, architecture="qwen35"),
    "qwen35moe": lambda path: tiny_hybrid(path, seed=3, architecture="qwen35moe"),
    "qwen4exp": lambda path: tiny_sparse(path, seed=4),
}


class HybridTests(BackendKit):
    """Tiny hybrid models on the backend against the same on the numpy reference, however they are read."""

    @pytest.mark.parametrize("name", MODELS)
    def test_hybrids_at_once_in_chunks_beside_others_and_resumed(
        self, backend: Backend, tmp_path: Path, name: str
    ) -> None:
        path = MODELS[name](tmp_path / "tiny.gguf")
        kv_type = "f32" if "f32" in backend.kv_types else backend.kv_types[0]
        expected = _runner(path, NumpyBackend(), kv_type).logits(TOKENS)
        run = _runner(path, backend, kv_type)
        self.close_to(run.logits(TOKENS), expected, self.model_tolerance)
        self.close_to(run.last_logits(TOKENS, 7), expected[-1], self.model_tolerance)
        run.step([Rows(1, 0, TOKENS[::-1][:20].copy())], [])
        found = run.step([Rows(1, 20, TOKENS[:5]), Rows(0, 0, TOKENS[:33])], [37])
        self.close_to(found[0], expected[32], self.model_tolerance)
        image = run.image(0, 33)
        run.step([Rows(0, 33, TOKENS[::-1][:9].copy())], [])  # goes on otherwise; what is stored stays
        run.resume(2, image)
        for at in range(33, 40):
            found = run.step([Rows(2, at, TOKENS[at : at + 1])], [0])
            self.close_to(found[0], expected[at], self.model_tolerance)
        self.close_to(run.step([Rows(2, 40, TOKENS[40:])], [18])[0], expected[-1], self.model_tolerance)


def _runner(path: Path, backend: Backend, kv_type: str) -> ModelRunner:
    families = Plugins.load(environ={}, entry_points=[]).families().values()
    model = load_model(GGUFFile.open(path), backend, families, ModelOptions())
    return ModelRunner(model, backend, sequences=3, length=64, kv_type=kv_type, page_tokens=8)
