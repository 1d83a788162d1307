"""The llama family: what it loads, what it refuses, and what its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from strata_core.compute.reference import NumpyBackend
from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.models.base import Family, Model, ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.runner import ModelRunner
from strata_core.testing.tiny import tiny_llama
from strata_core.weights.gguf import GGUFFile

TOKENS = np.arange(3, 40, dtype=np.int32)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model; ``change`` edits its tensors ``name -> float32 array`` before."""

    def make(change: Callable[[dict[str, np.ndarray]], object] | None = None, **fields: Any) -> Path:
        path = tiny_llama(tmp_path / "tiny.gguf", **fields)
        if change is None:
            return path
        with GGUFFile.open(path) as source:
            metadata = dict(source.metadata)
            tensors = {name: tensor.dequantise() for name, tensor in source.tensors.items()}
        change(tensors)
        stored = {name: quantise(array, "F32") for name, array in tensors.items()}
        return write_gguf(tmp_path / "changed.gguf", metadata, stored)

    return make


def load(path: Path, backend: NumpyBackend | None = None, **options: Any) -> Model:
    return load_model(GGUFFile.open(path), backend or NumpyBackend(), [FAMILY], ModelOptions(**options))


def logits(path: Path, **options: Any) -> np.ndarray:
    backend = NumpyBackend()
    return ModelRunner(load(path, backend, **options), backend, length=64, page_tokens=8).logits(TOKENS)


def test_geometry_layout_and_identity_come_from_the_file(tiny: Callable[..., Path]) -> None:
    model = load(tiny(layers=3, width=64, heads=4, kv_heads=2, context=777, vocab=400))
    geometry = model.geometry
    assert (geometry.layers, geometry.width, geometry.context, geometry.vocab) == (3, 64, 777, 400)
    (layout,) = model.layouts("f16", 16)
    assert len(layout.layers) == 3 and layout.layers[0][0].heads == 2 and layout.layers[0][0].width == 16
    assert model.identity()["kv_heads"] == 2


def test_identity_follows_what_changes_keys_and_values(tiny: Callable[..., Path]) -> None:
    path = tiny()
    plain = load(path).identity()
    assert load(path).identity() == plain
    for options in ({"rope_scale": 2.0}, {"rope_freq_base": 5e4}, {"rope_scaling": "yarn", "rope_scale": 1.5}):
        assert load(path, **options).identity() != plain
    assert load(tiny(metadata={"llama.attention.layer_norm_rms_epsilon": 1e-6})).identity() != plain


def test_a_rope_scale_stretches_the_context(tiny: Callable[..., Path]) -> None:
    assert load(tiny(context=512), rope_scale=4.0).geometry.context == 2048
    scaled = tiny(context=512, rope_scaling={"type": "yarn", "factor": 4.0, "original_context_length": 128})
    assert load(scaled).geometry.context == 512
    assert load(scaled, rope_scale=2.0).geometry.context == 256


def test_tied_weights_are_held_once(tiny: Callable[..., Path]) -> None:
    tied, untied = NumpyBackend(), NumpyBackend()
    load(tiny(tied=True), tied)
    load(tiny(tied=False), untied)
    assert tied.weight_bytes() == untied.weight_bytes()  # the untied embedding stays in the file


def test_tied_equals_untied_with_the_same_matrix(tiny: Callable[..., Path]) -> None:
    def untie(tensors: dict[str, np.ndarray]) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"]

    assert np.allclose(logits(tiny()), logits(tiny(untie)), atol=1e-5)


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v", "attn_output"])
def test_attention_biases_are_applied(tiny: Callable[..., Path], name: str) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"blk.1.{name}.bias"] = np.linspace(-1, 1, len(tensors[f"blk.1.{name}.weight"]), dtype=np.float32)

    assert np.abs(logits(tiny(add)) - logits(tiny())).max() > 1e-3


def test_key_and_value_lengths_other_than_width_by_heads(tiny: Callable[..., Path]) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):  # heads of 16 become heads of 24 (q, k) and 8 (v), which need other shapes
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                tensors[name] = np.concatenate([tensors[name], tensors[name][: len(tensors[name]) // 2]])
            elif name.endswith("attn_v.weight"):
                tensors[name] = tensors[name][: len(tensors[name]) // 2]
            elif name.endswith("attn_output.weight"):
                tensors[name] = np.ascontiguousarray(tensors[name][:, :32])

    keys = {"llama.attention.key_length": 24, "llama.attention.value_length": 8, "llama.rope.dimension_count": 16}
    path = tiny(widen, metadata=keys)
    assert np.isfinite(logits(path)).all()
    assert load(path).layouts("f32", 8)[0].layers[0][1].width == 8


@pytest.mark.parametrize("key, value", [("attention.scale", 0.7), ("embedding_scale", 3.0)])
def test_scales_of_the_file_are_applied(tiny: Callable[..., Path], key: str, value: float) -> None:
    assert np.abs(logits(tiny(metadata={f"llama.{key}": value})) - logits(tiny())).max() > 1e-3


@pytest.mark.parametrize(
    "key, value",
    [
        ("expert_count", 8),
        ("logit_scale", 0.5),
        ("residual_scale", 0.2),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("attention.causal", False),
        ("attention.sliding_window", 128),
        ("attention.temperature_scale", 0.1),
        ("attention.clamp_kqv", 8.0),
        ("attention.sliding_window_pattern", np.array([True, False])),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused_by_name(
    tiny: Callable[..., Path], key: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match=key) as caught:
        load(tiny(metadata={f"llama.{key}": value}))
    assert caught.value.param == f"llama.{key}"


def test_keys_with_a_value_that_asks_for_nothing_are_accepted(tiny: Callable[..., Path]) -> None:
    keys = {"expert_count": 0, "logit_scale": 1.0, "attention.sliding_window": 0, "attention.causal": True}
    load(tiny(metadata={f"llama.{key}": value for key, value in keys.items()}))


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.head_count_kv", 3),
        ("attention.head_count", 0),
        ("block_count", -1),
        ("context_length", 0),
        ("embedding_length", 63),
        ("feed_forward_length", "many"),
    ],
)
def test_impossible_sizes_are_model_file_errors(tiny: Callable[..., Path], key: str, value: object) -> None:
    with pytest.raises(ModelFileError):
        load(tiny(metadata={f"llama.{key}": value}))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(tiny: Callable[..., Path], key: str) -> None:
    with pytest.raises(ModelFileError, match=f"llama.{key}") as caught:
        load(tiny(metadata={f"llama.{key}": None}))
    assert caught.value.param == f"llama.{key}"


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight"]
)
def test_a_missing_tensor_is_named(tiny: Callable[..., Path], name: str) -> None:
    with pytest.raises(ModelFileError, match=name) as caught:
        load(tiny(lambda tensors: tensors.pop(name)))
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.attn_norm.weight"])
def test_a_tensor_of_another_shape_is_named(tiny: Callable[..., Path], name: str) -> None:
    def cut(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ascontiguousarray(tensors[name][..., :-1])

    with pytest.raises(ModelFileError, match="shape") as caught:
        load(tiny(cut))
    assert caught.value.param == name


def test_a_tensor_that_the_family_does_not_use_is_refused(tiny: Callable[..., Path]) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)

    with pytest.raises(UnsupportedModel, match="attn_q_norm") as caught:
        load(tiny(add))
    assert caught.value.param == "blk.0.attn_q_norm.weight"


def test_an_unknown_architecture_is_refused_with_the_known_ones(tiny: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*known: llama"):
        load(tiny(metadata={"general.architecture": "mamba"}))


def test_the_family_is_chosen_by_architecture(tiny: Callable[..., Path]) -> None:
    chosen: list[str] = []

    def pick(source: Any, backend: Any, options: Any) -> Model:
        chosen.append(source.require_key("general.architecture", str))
        return FAMILY.load(source, backend, options)

    other = attrs.evolve(FAMILY, name="other", architectures=("other",))
    mine = Family("mine", ("llama",), pick)
    load_model(GGUFFile.open(tiny()), NumpyBackend(), [other, mine], ModelOptions())
    assert chosen == ["llama"]


def test_progress_rises_from_nothing_to_all(tiny: Callable[..., Path]) -> None:
    seen: list[float] = []
    load_model(GGUFFile.open(tiny()), NumpyBackend(), [FAMILY], ModelOptions(), seen.append)
    assert seen[0] == 0.0 and seen[-1] == 1.0 and seen == sorted(seen) and len(seen) > 10


def test_weights_that_do_not_fit_are_used_as_stored(tiny: Callable[..., Path]) -> None:
    path = tiny(weights="Q4_1")
    small = NumpyBackend(keep_bytes=100_000)
    found = ModelRunner(load(path, small), small, length=64).logits(TOKENS)
    assert small.weight_bytes() < 101_500 < bytes_when_all_fit(path)
    assert np.allclose(found, logits(path), atol=1e-4)


def bytes_when_all_fit(path: Path) -> int:
    backend = NumpyBackend()
    load(path, backend)
    return backend.weight_bytes()


def test_the_same_batch_gives_the_same_bits(tiny: Callable[..., Path]) -> None:
    path = tiny()
    assert logits(path).tobytes() == logits(path).tobytes()
