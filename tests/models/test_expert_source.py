"""Models say which experts of a layer a step needs before they use them, and use no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from family_kit import load

from strata_core.compute.base import Array, Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.experts import ExpertTensors, ResidentExperts
from strata_core.testing.runner import ModelRunner
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights.tensor import StoredTensor

TOKENS = np.random.default_rng(4).integers(3, 384, 6).astype(np.int32)
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe": lambda path: tiny_family(path, architecture="qwen3moe"),
    "gpt_oss": lambda path: tiny_family(path, architecture="gpt-oss"),
    "deepseek_v3": lambda path: tiny_family(path, architecture="deepseek2"),
    "qwen3_next": lambda path: tiny_hybrid(path, architecture="qwen3next"),
    "qwen4_exp": tiny_sparse,
}


def only(tensor: StoredTensor | None, experts: set[int]) -> StoredTensor | None:
    """A tensor in which those of other experts are no numbers."""
    if tensor is None:
        return None
    values = tensor.dequantise()
    values[[number for number in range(len(values)) if number not in experts]] = np.nan
    return StoredTensor(tensor.name, tensor.shape, "F32", values.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("family", MODELS)
def test_a_step_uses_the_experts_that_it_asked_for(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, backend = MODELS[family](tmp_path / "tiny.gguf"), NumpyBackend()
    expected = ModelRunner(load(path, backend), backend, length=16, page_tokens=8).logits(TOKENS)
    asked: list[set[int]] = []
    init = ResidentExperts.__init__

    def remembering(self: Any, backend: Backend, layers: Mapping[int, ExpertTensors]) -> None:
        init(self, backend, layers)
        self.stored, self.backend = dict(layers), backend

    def sparing(self: Any, layer: int, ids: np.ndarray) -> Array:
        asked.append(set(ids.ravel().tolist()))
        parts = attrs.asdict(self.stored[layer], recurse=False)
        return self.backend.experts(*(only(tensor, asked[-1]) for tensor in parts.values()))

    monkeypatch.setattr(ResidentExperts, "__init__", remembering)
    monkeypatch.setattr(ResidentExperts, "fetch", sparing)
    found = ModelRunner(load(path, backend), backend, length=16, page_tokens=8).logits(TOKENS[:2])
    assert np.allclose(found, expected[:2], atol=1e-5)
    assert asked and any(len(experts) < 8 for experts in asked), "a step of two rows needs some of the experts"
