"""Layers that predict further tokens: which of them are loaded, and what with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_kit import Changed

from strata_core.compute.base import Batch, Span
from strata_core.compute.reference import NumpyBackend
from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.models.base import Model, ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights import open_model
from strata_core.weights.tensor import StoredTensor

TOKENS = np.random.default_rng(2).integers(1, 384, 40).astype(np.int32)
FAMILIES = Plugins.load(environ={}, entry_points=[]).families()
PAGE = 8

MODELS: dict[str, Callable[..., Path]] = {
    "deepseek_v3": lambda path, **more: tiny_family(path, architecture="deepseek2", **more),
    "qwen3_next": lambda path, **more: tiny_hybrid(path, architecture="qwen3next", **more),
    "qwen3_5": lambda path, **more: tiny_hybrid(path, architecture="qwen35", layers=3, **more),
    "qwen3_5_moe": lambda path, **more: tiny_hybrid(path, architecture="qwen35moe", **more),
    "qwen4_exp": tiny_sparse,
}


def load(path: Path, backend: NumpyBackend | None = None, further: bool = True) -> Model:
    options = ModelOptions(further=further)
    return load_model(open_model(path), backend or NumpyBackend(), FAMILIES.values(), options)


def changed(path: Path, tensors: dict[str, np.ndarray | None]) -> Path:
    """A copy with other tensors; None leaves one out."""
    with open_model(path) as source:
        metadata = dict(source.metadata)
        merged = {name: tensor.dequantise() for name, tensor in source.tensors.items()} | tensors
    stored = {name: quantise(array, "F32") for name, array in merged.items() if array is not None}
    return write_gguf(path.with_name("changed.gguf"), metadata, stored)


def guess(model: Model, backend: NumpyBackend) -> tuple[int, np.ndarray]:
    """What is guessed behind the tokens, and the layer's hidden row."""
    runner = ModelRunner(model, backend, length=64, kv_type="f32", page_tokens=PAGE)
    runner.step([Rows(0, 0, TOKENS[:-1])], [])
    assert model.further is not None
    hidden = np.random.default_rng(3).standard_normal((1, model.further.width)).astype(np.float32)
    span = Span(len(TOKENS) - 1, 1, (np.arange(64 // PAGE, dtype=np.int32),))
    ids, rows = model.further.guess(Batch(TOKENS[-1:], (span,), np.array([0], np.int32)), runner.stores[:1], hidden)
    return int(ids[0]), rows


@pytest.mark.parametrize("family", MODELS)
def test_it_is_loaded_only_when_asked_for_and_changes_no_logits(tmp_path: Path, family: str) -> None:
    path = MODELS[family](tmp_path / "tiny.gguf", further=2)
    models = [load(path, further=wanted) for wanted in (False, True)]
    assert [model.further is not None for model in models] == [False, True]
    found = [ModelRunner(model, NumpyBackend(), length=64, page_tokens=PAGE).logits(TOKENS) for model in models]
    assert np.array_equal(*found)
    plain = load(MODELS[family](tmp_path / "plain.gguf"), further=True)
    assert plain.further is None
    assert plain.identity() == models[0].identity()
    assert models[1].identity() == {**plain.identity(), "mtp": 1}, "messages name what differs as the option is named"
    layers = [len(model.layouts("f16", PAGE)[0].layers) for model in models]
    assert layers[1] == layers[0] + 1, "one more layer has K/V, whatever the file counts"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5", "qwen4_exp"])
def test_rows_go_into_every_type_of_pages_in_any_chunks(tmp_path: Path, family: str) -> None:
    backend = NumpyBackend()
    model = load(MODELS[family](tmp_path / "tiny.gguf", further=1), backend)
    [layout] = model.layouts("int8", PAGE)
    whole, parts = (ModelRunner(model, backend, length=64, kv_type="int8", page_tokens=PAGE) for _ in range(2))
    whole.step([Rows(0, 0, TOKENS)], [])
    carried = np.zeros((1, model.further.width), np.float32) if model.further else None
    forward = model.further.forward if model.further else None
    assert forward is not None

    def carrying(batch: Any, stores: Any, before: Any) -> Any:
        nonlocal carried
        logits, hidden = forward(batch, stores, carried)
        carried = hidden[-1:]
        return logits, hidden

    model.further.forward = carrying  # type: ignore[union-attr, method-assign]
    for start in range(0, len(TOKENS), 13):
        parts.step([Rows(0, start, TOKENS[start : start + 13])], [])
    blocks = [runner.image(0, len(TOKENS)).blocks[0] for runner in (whole, parts)]
    last = len(layout.layers) - 1
    for part, info in enumerate(layout.layers[last]):
        ours, theirs = (layout.view(block, last, part).astype(np.float32) for block in blocks)
        # A step of int8 where a rounding went the other way.
        assert np.abs(ours - theirs).max() <= (1 if info.dtype == np.int8 else 1e-3)
        assert ours.std() > 1e-3


def test_a_copy_of_the_models_tables_is_not_taken_in_again_and_another_one_is_used(tmp_path: Path) -> None:
    path = tiny_family(tmp_path / "tiny.gguf", architecture="deepseek2", further=1)
    with open_model(path) as source:
        tables = {name: source.require(f"{name}.weight").dequantise() for name in ("token_embd", "output")}
    names = {"token_embd": "blk.3.nextn.embed_tokens.weight", "output": "blk.3.nextn.shared_head_head.weight"}
    plain = NumpyBackend()
    expected = guess(load(path, plain), plain)
    copied = NumpyBackend()
    found = guess(load(changed(path, {names[n]: table for n, table in tables.items()}), copied), copied)
    assert copied.weight_bytes() == plain.weight_bytes()
    assert found[0] == expected[0]
    own = NumpyBackend()
    model = load(changed(path, {names["token_embd"]: tables["token_embd"][::-1].copy()}), own)
    assert not np.allclose(guess(model, own)[1], expected[1], atol=0.1)
    own = NumpyBackend()
    model = load(changed(path, {names["output"]: tables["output"][::-1].copy()}), own)
    assert guess(model, own)[0] == 383 - expected[0]
    assert own.weight_bytes() > plain.weight_bytes()


def test_without_a_norm_of_its_own_it_uses_the_models(tmp_path: Path) -> None:
    path = tiny_hybrid(tmp_path / "tiny.gguf", further=1)
    with open_model(path) as source:
        norm = source.require("output_norm.weight").dequantise()
    name = "blk.4.nextn.shared_head_norm.weight"
    rows = []
    for change in (None, norm):
        backend = NumpyBackend()
        rows.append(guess(load(changed(path, {name: change}), backend), backend)[1])
    assert np.array_equal(*rows)


def test_a_file_that_counts_the_layer_and_has_it_not_is_one_without(tmp_path: Path) -> None:
    path = tiny_hybrid(tmp_path / "tiny.gguf", further=1)
    with open_model(path) as source:
        gone = dict.fromkeys(name for name in source.tensors if name.startswith("blk.4."))
    assert load(changed(path, gone)).further is None


#: Those that some files have not: of DeepSeek-V2, and of layers that use the model's own norm.
OPTIONAL = ("exp_probs_b.bias", "nextn.shared_head_norm.weight")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5", "qwen4_exp"])
def test_a_tensor_of_the_layer_that_is_missing_or_of_another_shape_is_named(tmp_path: Path, family: str) -> None:
    path = MODELS[family](tmp_path / "tiny.gguf", further=1)
    with open_model(path) as source:
        last = source.metadata[f"{source.metadata['general.architecture']}.block_count"] - 1  # type: ignore[operator]
        shapes = {name: tensor.shape for name, tensor in source.tensors.items() if name.startswith(f"blk.{last}.")}
    for name, shape in shapes.items():
        for other in [(shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] + 32), None]:
            if other is None and name.endswith(OPTIONAL):
                continue
            damaged = Changed(path, without=(name,))
            if other is not None:
                damaged.tensors[name] = StoredTensor(name, other, "F32", np.zeros(4 * np.prod(other), np.uint8))
            with pytest.raises(ModelFileError, match=re.escape(name)):
                load_model(damaged, NumpyBackend(), FAMILIES.values(), ModelOptions(further=True))
    without = changed(path, {next(name for name in shapes if ".nextn." in name): None})
    assert load(without, further=False).further is None, "it takes no part where it is not asked for"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_more_such_layers_than_layers_are_refused(tmp_path: Path, family: str) -> None:
    name = {"deepseek_v3": "deepseek2", "qwen3_5": "qwen35"}[family]
    path = MODELS[family](tmp_path / "tiny.gguf", metadata={f"{name}.nextn_predict_layers": 3})
    with pytest.raises(ModelFileError, match="nextn_predict_layers"):
        load(path)


@pytest.mark.parametrize(("ratios", "fits"), [([0, 4, 0, 4, 0], True), ([0, 4, 0, 4, 4], True),
                                              ([0, 4, 0, 4, 8], False), ([0, 4, 4, 4, 4], False)])  # fmt: skip
def test_converters_differ_in_what_they_say_of_how_it_attends(tmp_path: Path, ratios: list[int], fits: bool) -> None:
    key = "qwen4exp.attention.compress_ratios"
    path = tiny_sparse(tmp_path / "tiny.gguf", further=1, metadata={key: np.array(ratios, np.int32)})
    if fits:
        assert load(path).further is not None
    else:
        with pytest.raises(UnsupportedModel, match="compress_ratios"):
            load(path)
