"""Tiny random models of every family give the logits of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from family_kit import TOKENS, load
from safetensors.numpy import load_file, save_file
from tiny_folders import TINIES, Tiny, write

from strata_core.compute.reference import NumpyBackend
from strata_core.testing.gguf_build import quantise
from strata_core.testing.runner import ModelRunner
from strata_core.weights.quant import TYPES, dequantise

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_families

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-4


def ours(path: Path) -> np.ndarray:
    backend = NumpyBackend()
    return ModelRunner(load(path, backend), backend, length=128, page_tokens=16).logits(TOKENS)


@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: tiny.name)
def test_logits_are_those_of_transformers(tmp_path: Path, tiny: Tiny) -> None:
    path = write(tiny, tmp_path)
    expected = hf_families.logits(path)
    assert np.abs(expected).max() > 1  # numbers worth comparing
    assert np.abs(ours(path) - expected).max() <= TOLERANCE


def test_experts_in_mxfp4_are_those_of_their_dequantised_weights(tmp_path: Path) -> None:
    """Published gpt-oss models hold ``(experts, out, in / 32)`` blocks; theirs get the same numbers unpacked."""
    tiny = next(tiny for tiny in TINIES if tiny.name == "gpt_oss")
    plain, packed = write(tiny, tmp_path / "plain"), tmp_path / "packed"
    tensors = load_file(plain / "model.safetensors")
    blocks = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = blocks.pop(name).swapaxes(1, 2)
        _, data, shape = quantise(weight, "MXFP4")
        raw = np.frombuffer(data, np.uint8)
        tensors[name] = np.ascontiguousarray(dequantise(TYPES["MXFP4"], raw).reshape(shape).swapaxes(1, 2))
        rows = raw.reshape(*shape[:2], -1, 17)
        blocks[f"{name}_scales"] = np.ascontiguousarray(rows[..., 0])
        codes = np.concatenate([rows[..., 1:] & 15, rows[..., 1:] >> 4], axis=-1)  # in order of element
        blocks[f"{name}_blocks"] = np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    save_file(blocks, packed / "model.safetensors", {"format": "pt"})
    assert np.abs(ours(packed) - hf_families.logits(plain)).max() <= TOLERANCE
