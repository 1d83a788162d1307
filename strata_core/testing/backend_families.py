"""Conformance of a backend under models of many families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.backend_kit import BackendKit
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_families import ARCHITECTURES, tiny_family
from strata_core.weights.gguf import GGUFFile

#: Longer than the windows, and more than one page of 8.
TOKENS = np.random.default_rng(5).integers(3, 384, 37).astype(np.int32)


class FamilyTests(BackendKit):
    """Tiny models of every family on the backend against the same on the numpy reference."""

    @pytest.mark.parametrize(
        "architecture, weights", [*((name, "F32") for name in ARCHITECTURES), ("qwen3", "Q8_0"), ("gpt-oss", "MXFP4")]
    )
    def test_models_read_at_once_and_step_by_step(
        self, backend: Backend, tmp_path: Path, architecture: str, weights: str
    ) -> None:
        path = tiny_family(tmp_path / "tiny.gguf", architecture=architecture, seed=3, weights=weights)
        kv_type = "f32" if "f32" in backend.kv_types else backend.kv_types[0]
        expected = self._run(path, NumpyBackend(), kv_type).logits(TOKENS)
        run = self._run(path, backend, kv_type)
        self.close_to(run.logits(TOKENS), expected, self.model_tolerance)
        found: list[NDArray[np.float32]] = [run.step([Rows(1, 0, TOKENS[:20])], [19])]
        found += [run.step([Rows(1, at, TOKENS[at : at + 1])], [0]) for at in range(20, len(TOKENS))]
        self.close_to(np.concatenate(found), expected[19:], self.model_tolerance)

    @staticmethod
    def _run(path: Path, backend: Backend, kv_type: str) -> ModelRunner:
        families = Plugins.load(environ={}, entry_points=[]).families().values()
        model = load_model(GGUFFile.open(path), backend, families, ModelOptions())
        return ModelRunner(model, backend, sequences=2, length=48, kv_type=kv_type, page_tokens=8)
