"""Tiny random llamas of every variant against ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_llama

from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.runner import ModelRunner
from strata_core.testing.tiny import tiny_llama
from strata_core.weights.gguf import GGUFFile

pytestmark = pytest.mark.oracle

TOKENS = np.random.default_rng(1).integers(3, 384, 200).astype(np.int32)
BASE = 10_000.0
#: Of the largest logit. The frequencies of `transformers` are rounded to float32 at every step, ours once.
TOLERANCE = 5e-5
PLAIN = ModelOptions()
YARN = {"factor": 4.0, "original_context_length": 64}
LLAMA3 = {"factor": 8.0, "original_context_length": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def difference(path: Path, options: ModelOptions = PLAIN, **overrides: Any) -> float:
    source, backend = GGUFFile.open(path), NumpyBackend()
    model = load_model(source, backend, [FAMILY], options)
    ours = ModelRunner(model, backend, length=256, page_tokens=16).logits(TOKENS)
    theirs = hf_llama.logits(hf_llama.load(source, **overrides), TOKENS)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": BASE, **parameters}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied": False},
        {"heads": 4, "kv_heads": 4},
        {"heads": 8, "kv_heads": 1},
        {"weights": "Q4_1"},
        {"weights": "Q8_0", "tied": False},
        {"rope_base": 500_000.0},
        {"layers": 5, "width": 96, "heads": 6, "kv_heads": 3, "ffn": 160},
    ],
    ids=str,
)
def test_geometries(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert difference(tiny_llama(tmp_path / "tiny.gguf", seed=1, **fields)) <= TOLERANCE


@pytest.mark.parametrize(
    "scaling, theirs",
    [
        ({"type": "linear", "factor": 4.0}, rope("linear", factor=4.0)),
        ({"type": "yarn", **YARN}, rope("yarn", factor=4.0, original_max_position_embeddings=64)),
        (
            {"type": "yarn", **YARN, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
            rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0),
        ),
        (
            {"type": "llama3", **LLAMA3},
            rope("llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
    ids=["linear", "yarn", "yarn-betas", "llama3"],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, object], theirs: dict[str, Any]) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", seed=2, rope_scaling=scaling, context=256)
    assert difference(path, rope_parameters=theirs) <= TOLERANCE
    assert difference(path) > 1e-3  # so that the comparison above would see scaling that was not applied


def test_llama3_scaling_as_a_rope_freqs_tensor(tmp_path: Path) -> None:
    """Factors as converters write them: by wavelength, blended between the two bounds."""
    wavelengths = 2 * np.pi / BASE ** (-np.arange(0, 16, 2) / 16)
    smooth = (64 / wavelengths - 1) / (4 - 1)
    factors = np.where(wavelengths < 16, 1, np.where(wavelengths > 64, 8, 1 / ((1 - smooth) / 8 + smooth)))
    path = tiny_llama(tmp_path / "tiny.gguf", seed=3, rope_freqs=factors.astype(np.float32))
    theirs = rope("llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)
    assert difference(path, rope_parameters=theirs) <= TOLERANCE


def test_overrides_equal_a_file_that_says_the_same(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", seed=4, context=64)
    options = ModelOptions(rope_scaling="yarn", rope_scale=4.0)
    theirs = rope("yarn", factor=4.0, original_max_position_embeddings=64)
    assert difference(path, options, rope_parameters=theirs, max_position_embeddings=256) <= TOLERANCE


def test_attention_biases_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    """Heads of 24 where width / heads is 16, all four biases."""
    random, width, heads, kv_heads, size = np.random.default_rng(5), 64, 4, 2, 24
    path = tiny_llama(tmp_path / "tiny.gguf", seed=5, heads=heads, kv_heads=kv_heads)
    with GGUFFile.open(path) as source:
        metadata = dict(source.metadata) | {"llama.attention.key_length": size, "llama.attention.value_length": size}
        metadata["llama.rope.dimension_count"] = size
        tensors = {name: tensor.dequantise() for name, tensor in source.tensors.items()}
    for layer in range(2):
        shapes = {"attn_q": (heads * size, width), "attn_k": (kv_heads * size, width)}
        shapes |= {"attn_v": (kv_heads * size, width), "attn_output": (width, heads * size)}
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = random.standard_normal(shape).astype(np.float32) / 5
            tensors[f"blk.{layer}.{name}.bias"] = random.standard_normal(shape[0]).astype(np.float32)
    changed = write_gguf(
        tmp_path / "changed.gguf", metadata, {name: quantise(array, "F32") for name, array in tensors.items()}
    )
    assert difference(changed) <= TOLERANCE
