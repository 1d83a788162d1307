"""Conformance of a backend under a whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend, Batch, PageStore, Span
from strata_core.compute.reference import NumpyBackend
from strata_core.memory.arena import Arena
from strata_core.models.base import Model, ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.backend_kit import BackendKit
from strata_core.testing.tiny import tiny_llama
from strata_core.weights.gguf import GGUFFile

PAGE, LENGTH = 8, 61


class Runner:
    """A tiny model on a backend, and pages enough for a few sequences."""

    def __init__(self, path: Path, backend: Backend, arena: Arena, kv_type: str):
        self.model: Model = load_model(GGUFFile.open(path), backend, [FAMILY], ModelOptions())
        layouts = self.model.layouts(kv_type, PAGE)
        self.stores: list[PageStore] = [backend.page_store(layout, 7, arena) for layout in layouts]
        for store in self.stores:
            for chunk in range(6):
                store.add_chunk(chunk)

    def run(self, parts: list[tuple[int, int, NDArray[np.int32]]], outputs: list[int]) -> NDArray[np.float32]:
        """One step: ``(number of the sequence, start, tokens)`` of each part."""
        spans = [
            Span(start, len(tokens), tuple(np.arange(number * 8, number * 8 + 8, dtype=np.int32) for _ in self.stores))
            for number, start, tokens in parts
        ]
        tokens = np.concatenate([tokens for _, _, tokens in parts])
        return self.model.forward(Batch(tokens, tuple(spans), np.array(outputs, np.int32)), self.stores)


class ModelTests(BackendKit):
    """A tiny llama on the backend against the same on the numpy reference."""

    @pytest.fixture
    def tokens(self) -> NDArray[np.int32]:
        return np.random.default_rng(3).integers(3, 384, LENGTH).astype(np.int32)

    @pytest.fixture(params=["F32", "Q4_1"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return tiny_llama(tmp_path / "tiny.gguf", seed=4, weights=request.param, tied=request.param == "F32")

    @pytest.fixture
    def runner(self, path: Path, backend: Backend, arena: Arena) -> Runner:
        return Runner(path, backend, arena, backend.kv_types[0])

    @pytest.fixture
    def expected(self, path: Path, arena: Arena, backend: Backend, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        runner = Runner(path, NumpyBackend(), arena, backend.kv_types[0])
        return runner.run([(0, 0, tokens)], list(range(LENGTH)))

    def test_logits_of_every_row(
        self, runner: Runner, tokens: NDArray[np.int32], expected: NDArray[np.float32]
    ) -> None:
        self.close_to(runner.run([(0, 0, tokens)], list(range(LENGTH))), expected, self.model_tolerance)

    @pytest.mark.parametrize("chunk", [1, 7, 32])
    def test_full_chunked_and_stepwise_agree(
        self, runner: Runner, tokens: NDArray[np.int32], expected: NDArray[np.float32], chunk: int
    ) -> None:
        for start in range(0, LENGTH, chunk):
            part = tokens[start : start + chunk]
            logits = runner.run([(0, start, part)], [len(part) - 1])
            self.close_to(logits, expected[start + len(part) - 1 :][:1], self.model_tolerance)

    def test_rows_of_several_sequences_in_one_step(
        self, runner: Runner, tokens: NDArray[np.int32], expected: NDArray[np.float32]
    ) -> None:
        runner.run([(1, 0, tokens[:40]), (3, 0, tokens[:60])], [])
        parts = [(0, 0, tokens[:33]), (1, 40, tokens[40:41]), (2, 0, tokens[:1]), (3, 60, tokens[60:])]
        logits = runner.run(parts, [32, 33, 34, 35])
        self.close_to(logits, expected[[32, 40, 0, 60]], self.model_tolerance)

    def test_a_step_without_outputs_still_writes_its_rows(
        self, runner: Runner, tokens: NDArray[np.int32], expected: NDArray[np.float32]
    ) -> None:
        assert runner.run([(0, 0, tokens[:50])], []).shape == (0, runner.model.geometry.vocab)
        logits = runner.run([(0, 50, tokens[50:])], [LENGTH - 51])
        self.close_to(logits, expected[-1:], self.model_tolerance)
