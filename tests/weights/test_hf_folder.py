"""Hugging Face folders, read with the names and the order of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_build import DIM, HEADS, KV, LLAMA, WIDTH, llama_tensors, numbers, write_folder

from strata_core.errors import ModelFileError, NotFound, UnsupportedModel
from strata_core.weights import open_model


def test_a_folder_has_the_keys_and_tensors_of_a_gguf_file(tmp_path: Path) -> None:
    tensors = llama_tensors()
    with open_model(write_folder(tmp_path, LLAMA, tensors)) as model:
        keys = {key.removeprefix("llama."): value for key, value in model.metadata.items()}
        assert keys["general.architecture"] == "llama" and keys["block_count"] == 2
        assert keys["attention.head_count_kv"] == KV and keys["rope.freq_base"] == 5e4
        assert keys["attention.key_length"] == keys["rope.dimension_count"] == DIM
        assert len(model.tensors) == len(tensors)
        np.testing.assert_array_equal(
            model.require("blk.1.ffn_down.weight").dequantise(), tensors["model.layers.1.mlp.down_proj.weight"]
        )
        assert not model.require("output.weight").derived
        rows = tensors["model.layers.0.self_attn.q_proj.weight"].reshape(HEADS, 2, DIM // 2, WIDTH)
        pairs = np.stack([rows[:, 0], rows[:, 1]], 2).reshape(HEADS * DIM, WIDTH)
        np.testing.assert_array_equal(model.require("blk.0.attn_q.weight").dequantise(), pairs)


def test_what_is_not_known_is_left_for_the_family_to_refuse(tmp_path: Path) -> None:
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": numbers(2), "model.layers.1.strange.weight": numbers(2)}
    with open_model(write_folder(tmp_path, LLAMA, {**llama_tensors(), **more})) as model:
        names = model.tensors.keys()
        assert "model.layers.1.strange.weight" in names and not any("inv_freq" in name for name in names)


def test_tied_embeddings_are_one_tensor_even_if_the_file_has_both(tmp_path: Path) -> None:
    with open_model(write_folder(tmp_path, {**LLAMA, "tie_word_embeddings": True}, llama_tensors())) as model:
        assert "token_embd.weight" in model.tensors and "output.weight" not in model.tensors


def test_sets_of_files_are_one_model_with_the_identity_of_one_file(tmp_path: Path) -> None:
    one = open_model(write_folder(tmp_path / "one", LLAMA, llama_tensors()))
    three = open_model(write_folder(tmp_path / "three", LLAMA, llama_tensors(), files=3))
    assert three.tensors.keys() == one.tensors.keys() and three.fingerprint() == one.fingerprint()
    changed = llama_tensors()
    changed["model.norm.weight"] = changed["model.norm.weight"] + 1
    assert open_model(write_folder(tmp_path / "other", LLAMA, changed)).fingerprint() != one.fingerprint()


def test_what_is_missing_of_a_set_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA, llama_tensors(), files=3)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    (folder / "model-00002-of-00003.safetensors").rename(folder / "away")
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.safetensors: this file of the model is missing"):
        open_model(folder)
    (folder / "away").rename(folder / "model-00002-of-00003.safetensors")
    wrong = {**places["weight_map"], "model.ghost.weight": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ModelFileError, match=r"the index says that tensor model\.ghost\.weight is in") as caught:
        open_model(folder)
    assert caught.value.param == "model.ghost.weight"
    index.write_text(json.dumps({"weight_map": {"a": "../../model.safetensors"}}))
    with pytest.raises(ModelFileError, match="no name of a file"):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"hidden_size": None}, ModelFileError, "hidden_size"),
        ({"hidden_size": "8"}, ModelFileError, "hidden_size"),
        ({"num_hidden_layers": True}, ModelFileError, "num_hidden_layers"),
        ({"num_attention_heads": 0}, ModelFileError, "num_attention_heads"),
        ({"num_key_value_heads": -1}, ModelFileError, "num_key_value_heads"),
        ({"vocab_size": 2**40}, ModelFileError, "vocab_size"),
        ({"model_type": "bert"}, UnsupportedModel, "model_type"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedModel, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, ModelFileError, "rope_scaling.factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantization_config"),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_key(
    tmp_path: Path, change: dict[str, Any], kind: type[ModelFileError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        open_model(write_folder(tmp_path, {**LLAMA, **change}, llama_tensors()))
    assert caught.value.param == param and param.rpartition(".")[2] in caught.value.message


def test_folders_without_a_model_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(NotFound, match=r"neither model\.safetensors nor"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_model(tmp_path)


def test_rows_that_heads_cannot_share_are_an_error(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "model.layers.0.self_attn.q_proj.weight": numbers(7, WIDTH)}
    with pytest.raises(ModelFileError, match="does not have an even number of rows"):
        open_model(write_folder(tmp_path, LLAMA, tensors))


MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5}


def test_experts_are_stacked_whether_they_lie_apart_or_together(tmp_path: Path) -> None:
    gate, up, down = (np.stack([numbers(*shape, seed=s + i) for i in range(3)])
                      for s, shape in ((1, (5, WIDTH)), (4, (5, WIDTH)), (7, (WIDTH, 5))))  # fmt: skip
    apart = {
        f"model.layers.0.mlp.experts.{number}.{part}_proj.weight": array[number]
        for part, array in (("gate", gate), ("up", up), ("down", down))
        for number in range(3)
    }
    together = {
        "model.layers.0.mlp.experts.gate_up_proj": np.concatenate([gate, up], 1),
        "model.layers.0.mlp.experts.down_proj": down,
    }
    for name, tensors in (("apart", apart), ("together", together)):
        with open_model(write_folder(tmp_path / name, MOE, tensors)) as model:
            for part, array in (("gate", gate), ("up", up), ("down", down)):
                stack = model.require(f"blk.0.ffn_{part}_exps.weight")
                np.testing.assert_array_equal(stack.dequantise(), array)
                np.testing.assert_array_equal(stack.inner(2).dequantise(), array[2])
            assert model.metadata["qwen3moe.expert_count"] == 3
    del apart["model.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"mlp.experts.1.up_proj.weight of layer 0 is missing"):
        open_model(write_folder(tmp_path / "gap", MOE, apart))


def test_mxfp4_experts_keep_their_codes(tmp_path: Path) -> None:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    random = np.random.default_rng(3)
    codes = random.integers(0, 256, (2, 6, 2, 16)).astype(np.uint8)
    scales = random.integers(120, 134, (2, 6, 2)).astype(np.uint8)
    values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(2, 6, 2, 32)
    values = (values * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(2, 6, 64)
    config = {
        **LLAMA, "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": codes,
        "model.layers.0.mlp.experts.gate_up_proj_scales": scales,
        "model.layers.0.mlp.experts.gate_up_proj_bias": numbers(2, 6),
    }
    with open_model(write_folder(tmp_path, config, tensors)) as model:
        gate, up = model.require("blk.0.ffn_gate_exps.weight", (2, 3, 64)), model.require("blk.0.ffn_up_exps.weight")
        assert gate.type == "MXFP4"
        np.testing.assert_array_equal(gate.dequantise(), values[:, ::2])
        np.testing.assert_array_equal(up.inner(1).dequantise(), values[1, 1::2])
        np.testing.assert_array_equal(model.require("blk.0.ffn_up_exps.bias").dequantise(), numbers(2, 6)[:, 1::2])
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"] = scales[:1]
    with pytest.raises(ModelFileError, match="is not made of blocks with the scales"):
        open_model(write_folder(tmp_path / "bad", config, tensors))
