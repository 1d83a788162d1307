"""Hybrid families: forms of their files, what they refuse, what they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_core.compute.reference import NumpyBackend
from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.models.base import Model, ModelOptions
from strata_core.models.hybrid.ngrams import NGramHash
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights.gguf import GGUFFile
from strata_core.weights.rows import DirectRows, RowTable

TOKENS = np.random.default_rng(2).integers(1, 384, 50).astype(np.int32)
FAMILIES = Plugins.load(environ={}, entry_points=[]).families()
Arrays = dict[str, np.ndarray]


def load(path: Path, options: ModelOptions | None = None) -> Model:
    source = GGUFFile.open(path)
    return load_model(source, NumpyBackend(), FAMILIES.values(), options or ModelOptions())


def logits(model: Model, tokens: np.ndarray = TOKENS) -> np.ndarray:
    return ModelRunner(model, NumpyBackend(), length=64, page_tokens=8).logits(tokens)


def changed(path: Path, change: Callable[[Arrays], None]) -> Path:
    """A copy with other tensors."""
    with GGUFFile.open(path) as source:
        metadata = dict(source.metadata)
        tensors = {name: tensor.dequantise() for name, tensor in source.tensors.items()}
    change(tensors)
    stored = {name: quantise(array, "F32") for name, array in tensors.items()}
    return write_gguf(path.with_name("changed.gguf"), metadata, stored)


def into_one_projection(tensors: Arrays) -> None:
    """q, k, v and z of every key head together, as early files of Qwen3-Next have them."""
    for name in [name for name in tensors if name.endswith("attn_qkv.weight")]:
        qkv, z = tensors.pop(name), tensors.pop(name.replace("qkv", "gate"))
        q, k, v = (part.reshape(2, -1, 64) for part in np.split(qkv, [32, 64]))
        joint = np.concatenate([q, k, v, z.reshape(2, -1, 64)], axis=1)
        tensors[name.replace("attn_qkv", "ssm_in")] = joint.reshape(-1, 64)


def into_one_expert_tensor(tensors: Arrays) -> None:
    for name in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
        parts = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)


def without_dimensions_of_one(tensors: Arrays) -> None:
    for name in [name for name in tensors if name.endswith("ffn_gate_inp_shexp.weight")]:
        tensors[name] = tensors[name][0]


@pytest.mark.parametrize("change", [into_one_projection, into_one_expert_tensor, without_dimensions_of_one])
def test_other_forms_of_the_same_weights_give_the_same_logits(tmp_path: Path, change: Callable[[Arrays], None]) -> None:
    path = tiny_hybrid(tmp_path / "tiny.gguf")
    np.testing.assert_allclose(logits(load(changed(path, change))), logits(load(path)), atol=1e-4)


def test_value_heads_are_tiled_in_qwen35_and_grouped_in_qwen3next(tmp_path: Path) -> None:
    """The same numbers under both names differ, unless every value head has a key head of its own."""

    def as_next(tensors: Arrays) -> None:
        for name in [name for name in tensors if name.endswith("ssm_beta.weight")]:
            beta, alpha = tensors.pop(name), tensors.pop(name.replace("beta", "alpha"))
            joint = np.concatenate([beta.reshape(2, -1, 64), alpha.reshape(2, -1, 64)], axis=1)
            tensors[name.replace("beta", "ba")] = joint.reshape(-1, 64)

    def tiled(tensors: Arrays) -> None:
        """Value heads 0 1 2 3, of key heads 0 0 1 1, in the order 0 2 1 3."""
        order = np.array([0, 2, 1, 3])
        for name, array in tensors.items():
            if name.endswith(("ssm_a", "ssm_dt.bias", "ssm_beta.weight", "ssm_alpha.weight")):
                tensors[name] = array[order]
            elif name.endswith("attn_gate.weight"):
                tensors[name] = array.reshape(4, 16, -1)[order].reshape(array.shape)
            elif name.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
                values = array[64:].reshape(4, 16, -1)[order].reshape(64, -1)
                tensors[name] = np.concatenate([array[:64], values])
            elif name.endswith("ssm_out.weight"):
                tensors[name] = array.reshape(-1, 4, 16)[:, order].reshape(array.shape)

    path = tiny_hybrid(tmp_path / "tiny.gguf", architecture="qwen35moe")
    grouped = tiny_hybrid(tmp_path / "next.gguf", architecture="qwen3next")
    with GGUFFile.open(path) as source:
        tensors = {name: tensor.dequantise() for name, tensor in source.tensors.items()}
    as_next(tensors)
    with GGUFFile.open(grouped) as source:
        metadata = dict(source.metadata)
    stored = {name: quantise(array, "F32") for name, array in tensors.items()}
    expected = logits(load(write_gguf(grouped, metadata, stored)))
    np.testing.assert_allclose(logits(load(changed(path, tiled))), expected, atol=1e-4)
    assert np.abs(logits(load(path)) - expected).max() > 1e-2


@pytest.mark.parametrize(
    "key, value, error, said",
    [
        ("full_attention_interval", 5, ModelFileError, "none of 4 layers attends"),
        ("ssm.time_step_rank", 3, ModelFileError, "2 key heads"),
        ("ssm.inner_size", 63, ModelFileError, "multiple of 4"),
        ("expert_used_count", 9, ModelFileError, "8 experts"),
        ("nextn_predict_layers", 4, ModelFileError, "only 4 layers"),
        ("attention.sliding_window", 8, UnsupportedModel, "sliding_window"),
        ("attention.indexer.top_k", 25, ModelFileError, "block of 4"),
        ("attention.indexer.local_blocks", 2, UnsupportedModel, "local_blocks"),
        ("attention.indexer.key_length", 6, ModelFileError, "8 elements are rotated"),
        ("attention.compress_ratios", np.array([4, 0, 4, 0], np.int32), UnsupportedModel, "compress_ratios"),
        ("ple.ngram_size", 1, ModelFileError, "two tokens"),
        ("ple.layers", np.array([0, 1], np.int32), ModelFileError, "hold 1 numbers"),
        ("ple.head_offsets", np.array([0, 101, 204, 312], np.int64), ModelFileError, "420 rows"),
        ("embedding_length_per_layer_input", 31, ModelFileError, "16 elements"),
    ],
)
def test_keys_that_make_no_sense_or_ask_for_more_are_named(
    tmp_path: Path, key: str, value: object, error: type[Exception], said: str
) -> None:
    path = tiny_sparse(tmp_path / "tiny.gguf", metadata={f"qwen4exp.{key}": value})
    with pytest.raises(error, match=said):
        load(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = tiny_hybrid(tmp_path / "tiny.gguf", architecture="qwen35", seed=2)
    longer = tiny_hybrid(
        tmp_path / "longer.gguf",
        architecture="qwen35",
        seed=2,
        metadata={"qwen35.block_count": 5} | {"qwen35.nextn_predict_layers": 1},
    )

    def one_more(tensors: Arrays) -> None:
        for name in [name for name in tensors if name.startswith("blk.3.")]:
            tensors[name.replace("blk.3.", "blk.4.")] = tensors[name]
        tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)

    model = load(changed(longer, one_more))
    assert model.geometry.layers == 4
    assert np.array_equal(logits(model), logits(load(path)))


@pytest.mark.parametrize("name", ["blk.0.ssm_a", "blk.0.hc_attn_inject.weight", "blk.1.indexer.k_norm.weight"])
def test_a_tensor_that_is_missing_or_unknown_is_named(tmp_path: Path, name: str) -> None:
    path = tiny_sparse(tmp_path / "tiny.gguf")
    with pytest.raises(ModelFileError, match=name):
        load(changed(path, lambda tensors: tensors.pop(name)))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.mtp"):
        load(changed(path, lambda tensors: tensors.update({"blk.0.mtp": np.zeros(3, np.float32)})))


def test_an_indexer_leaves_positions_out_beyond_its_budget(tmp_path: Path) -> None:
    narrow, wide = (tiny_sparse(tmp_path / f"{k}.gguf", top_k=k) for k in (12, 400))
    few, all_ = logits(load(narrow)), logits(load(wide))
    np.testing.assert_allclose(few[:15], all_[:15], atol=1e-4)  # three blocks, and what is in none
    assert np.abs(few[40:] - all_[40:]).max() > 1e-2


def test_the_ways_of_reading_the_table_give_the_same_logits_and_are_counted(tmp_path: Path) -> None:
    path = tiny_sparse(tmp_path / "tiny.gguf")
    models = {way: load(path, ModelOptions(ple_io=way, ple_cache_bytes=1000)) for way in ("mmap", "direct", "ram")}
    found = {way: logits(model) for way, model in models.items()}
    for way, model in models.items():
        assert np.array_equal(found[way], found["mmap"])
        assert model.counters()["ple_rows"] == 4 * len(TOKENS)
        assert (model.counters()["ple_reads"] > 0) == (way == "direct")
        model.close()


def test_a_state_page_holds_every_layers_state_and_the_dilated_convolution(tmp_path: Path) -> None:
    layout = load(tiny_sparse(tmp_path / "tiny.gguf")).state_layout()
    assert layout is not None
    sizes = {part.name: part.heads * part.width for (part,) in layout.layers}
    channels, delta, ngrams = 2 * 32 + 64, 4 * 16 * 16, 3 * 3 * 4 * 64
    assert sizes == {
        "conv.0": 3 * channels, "delta.0": delta, "conv.2": 3 * channels, "delta.2": delta, "ngrams.0": ngrams,
    }  # fmt: skip


def plain_rows(ids: list[int], h: NGramHash) -> list[int]:
    """Rows of the last of these ids, straight from the definition."""
    context: list[int] = []
    for distance in range(len(h.multipliers)):
        reach = len(ids) - 1 - distance
        between = ids[max(reach, 0) : len(ids) - 1]
        context.append(ids[reach] if reach >= 0 and h.end_of_text not in between else h.end_of_text)
    out = []
    for order in range(2, len(h.multipliers) + 1):
        mixed = 0
        for token, multiplier in zip(context[:order], h.multipliers.tolist(), strict=False):
            mixed ^= token * multiplier
        out += [mixed % int(n) + int(o) for n, o in zip(h.sizes[order - 2], h.offsets[order - 2], strict=True)]
    return out


@pytest.mark.parametrize("order", [2, 3, 4])
def test_rows_of_ngrams_wherever_a_span_begins(order: int) -> None:
    random = np.random.default_rng(order)
    multipliers = np.array([23703573157769, 20109073645365, 8052911324071, 31])[:order]
    sizes = random.integers(1000, 20_000_000, (order - 1, 3))
    h = NGramHash(multipliers, sizes, np.cumsum(sizes).reshape(sizes.shape), end_of_text=7)
    ids = random.integers(0, 248_320, 40)
    ids[[3, 10, 11, 20, 22]] = 7
    expected = [plain_rows(ids[: n + 1].tolist(), h) for n in range(40)]
    for start in range(0, 25):
        before = ids[max(0, start - h.lookback) : start]
        assert h.rows(ids[start:].astype(np.int32), before.astype(np.int32)).tolist() == expected[start:]
        assert h.rows(ids[start : start + 1].astype(np.int32), before.astype(np.int32)).tolist() == [expected[start]]


def test_a_step_without_outputs_still_moves_states_on(tmp_path: Path) -> None:
    model = load(tiny_sparse(tmp_path / "tiny.gguf"))
    expected = logits(model)
    runner = ModelRunner(model, NumpyBackend(), length=64, page_tokens=8)
    assert runner.step([Rows(0, 0, TOKENS[:20])], []).shape == (0, 384)
    np.testing.assert_allclose(runner.step([Rows(0, 20, TOKENS[20:])], [29])[0], expected[-1], atol=1e-4)


def test_a_model_that_is_refused_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RowTable] = []
    monkeypatch.setattr(DirectRows, "close", lambda table: closed.append(table))
    path = changed(tiny_sparse(tmp_path / "tiny.gguf"), lambda t: t.update({"blk.0.mtp": np.zeros(3, np.float32)}))
    with pytest.raises(UnsupportedModel, match="mtp"):
        load(path, ModelOptions(ple_io="direct"))
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].close()
