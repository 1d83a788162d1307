"""Tiny random models of every family give the logits of ``transformers``, however their prompts came to be in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from family_kit import TOKENS, load
from safetensors.numpy import load_file, save_file
from tiny_folders import TINIES, write

from strata_core.compute.reference import NumpyBackend
from strata_core.plugins import Plugins
from strata_core.testing.gguf_build import quantise
from strata_core.testing.runner import ModelRunner
from strata_core.weights.quant import TYPES, dequantise

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_families
from hf_logits import logits
from parity import CASES, COLUMNS, TOLERANCE, Case, Pair

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    plugins = Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())
    return Pair.make(case, tmp_path_factory.mktemp(case.name), plugins)


@pytest.mark.parametrize("column", COLUMNS)
def test_logits_are_those_of_transformers(pair: Pair, column: str) -> None:
    assert np.abs(pair.expected).max() > 1  # numbers worth comparing
    assert COLUMNS[column](pair) <= TOLERANCE


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
    backend = NumpyBackend()
    found = ModelRunner(load(packed, backend), backend, length=128, page_tokens=16).logits(TOKENS)
    assert np.abs(found - logits(hf_families.load(plain), TOKENS)).max() <= TOLERANCE
