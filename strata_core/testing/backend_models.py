"""Conformance of a backend under a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.backend_kit import BackendKit
from strata_core.testing.runner import ModelRunner, Rows, Tokens
from strata_core.testing.tiny import tiny_llama
from strata_core.weights.gguf import GGUFFile

LENGTH = 61


class ModelTests(BackendKit):
    """A tiny llama on the backend against the same on the numpy reference."""

    @pytest.fixture
    def tokens(self) -> Tokens:
        return np.random.default_rng(3).integers(3, 384, LENGTH).astype(np.int32)

    @pytest.fixture(params=["F32", "Q4_1"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return tiny_llama(tmp_path / "tiny.gguf", seed=4, weights=request.param, tied=request.param == "F32")

    @pytest.fixture
    def runner(self, path: Path, backend: Backend) -> Iterator[ModelRunner]:
        runner = self._runner(path, backend, backend.kv_types[0])
        yield runner
        runner.close()

    @pytest.fixture
    def expected(self, path: Path, backend: Backend, tokens: Tokens) -> NDArray[np.float32]:
        return self._runner(path, NumpyBackend(), backend.kv_types[0]).logits(tokens)

    @staticmethod
    def _runner(path: Path, backend: Backend, kv_type: str) -> ModelRunner:
        model = load_model(GGUFFile.open(path), backend, [FAMILY], ModelOptions())
        return ModelRunner(model, backend, sequences=4, length=LENGTH, kv_type=kv_type, page_tokens=8)

    def test_logits_of_every_row(
        self, runner: ModelRunner, tokens: Tokens, expected: NDArray[np.float32]
    ) -> None:
        self.close_to(runner.logits(tokens), expected, self.model_tolerance)

    @pytest.mark.parametrize("chunk", [1, 7, 32])
    def test_full_chunked_and_stepwise_agree(
        self, runner: ModelRunner, tokens: Tokens, expected: NDArray[np.float32], chunk: int
    ) -> None:
        for start in range(0, LENGTH, chunk):
            part = tokens[start : start + chunk]
            logits = runner.step([Rows(0, start, part)], [len(part) - 1])
            self.close_to(logits, expected[start + len(part) - 1 :][:1], self.model_tolerance)

    def test_rows_of_several_sequences_in_one_step(
        self, runner: ModelRunner, tokens: Tokens, expected: NDArray[np.float32]
    ) -> None:
        runner.step([Rows(1, 0, tokens[:40]), Rows(3, 0, tokens[:60])], [])
        parts = [Rows(0, 0, tokens[:33]), Rows(1, 40, tokens[40:41]), Rows(2, 0, tokens[:1]), Rows(3, 60, tokens[60:])]
        logits = runner.step(parts, [32, 33, 34, 35])
        self.close_to(logits, expected[[32, 40, 0, 60]], self.model_tolerance)

    def test_a_step_without_outputs_still_writes_its_rows(
        self, runner: ModelRunner, tokens: Tokens, expected: NDArray[np.float32]
    ) -> None:
        assert runner.step([Rows(0, 0, tokens[:50])], []).shape == (0, runner.model.geometry.vocab)
        logits = runner.step([Rows(0, 50, tokens[50:])], [LENGTH - 51])
        self.close_to(logits, expected[-1:], self.model_tolerance)
