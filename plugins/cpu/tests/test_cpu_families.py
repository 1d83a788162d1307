"""Families whose layers the fused step computes otherwise than a llama's: norms of heads before their rotation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cpu_kit import make
from numpy.typing import NDArray

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.models.qwen3 import FAMILY
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_families import tiny_family
from strata_core.weights.gguf import GGUFFile

LENGTH = 40


def logits(path: Path, backend: Backend, tokens: NDArray[np.int32], pieces: Sequence[int]) -> NDArray[np.float32]:
    """Of the end of each piece."""
    model = load_model(GGUFFile.open(path), backend, [FAMILY], ModelOptions())
    runner = ModelRunner(model, backend, sequences=1, length=LENGTH, kv_type="f32", page_tokens=8)
    ends = np.cumsum(pieces)
    return np.concatenate([
        runner.step([Rows(0, end - size, tokens[end - size : end])], [size - 1])
        for size, end in zip(pieces, ends, strict=True)
    ])  # fmt: skip


def test_heads_are_normed_in_prompts_and_while_decoding(isa: str, tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "tiny.gguf", architecture="qwen3")
    tokens = np.random.default_rng(1).integers(3, 100, LENGTH).astype(np.int32)
    pieces = [30] + [1] * 10
    own, expected = (logits(path, backend, tokens, pieces) for backend in (make(2, isa), NumpyBackend()))
    assert np.abs(own - expected).max() < 5e-3 * np.abs(expected).max()
