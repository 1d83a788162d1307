"""Layers that predict further tokens, in Hugging Face folders: behind the others, as GGUF files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_build import numbers, write_folder

from strata_core.errors import ModelFileError
from strata_core.weights import open_model

_CONFIG: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 12, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3,
}  # fmt: skip
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
_SPARSE = {
    **_EXPERTS, "hc_count": 2, "hc_lowrank": 4, "output_gate_type": "sigmoid", "indexer_n_heads": 2,
    "indexer_head_dim": 4, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 4, "num_nextn_predict_layers": 1,
}  # fmt: skip
_QWEN = {
    "mtp.fc.weight": (8, 16), "mtp.pre_fc_norm_embedding.weight": (8,), "mtp.pre_fc_norm_hidden.weight": (8,),
    "mtp.norm.weight": (8,), "mtp.layers.0.input_layernorm.weight": (8,), "mtp.layers.0.mlp.up_proj.weight": (12, 8),
}  # fmt: skip


def folder(path: Path, kind: str, shapes: dict[str, tuple[int, ...]], **config: Any) -> Path:
    tensors = {name: numbers(*shape) for name, shape in shapes.items()}
    return write_folder(path, {**_CONFIG, "model_type": kind, **config}, tensors)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_qwens_layer_comes_behind_the_others_with_norms_as_they_are_used(tmp_path: Path, prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in _QWEN.items()} | {"mtp.layers.1.input_layernorm.weight": (8,)}
    with open_model(folder(tmp_path, "qwen3_5_text", shapes, **_LINEAR)) as model:
        assert (model.metadata["qwen35.block_count"], model.metadata["qwen35.nextn_predict_layers"]) == (5, 2)
        expected = {
            "blk.3.nextn.eh_proj.weight": numbers(8, 16), "blk.3.ffn_up.weight": numbers(12, 8),
            **{f"blk.{name}.weight": numbers(8) + 1
               for name in ("3.nextn.enorm", "3.nextn.hnorm", "3.nextn.shared_head_norm", "3.attn_norm",
                            "4.attn_norm")},
        }  # fmt: skip
        assert set(model.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(model.require(name).dequantise(), array)


def test_two_matrices_whose_products_are_added_are_one_of_both_inputs(tmp_path: Path) -> None:
    mixer = {"hc_norm": (16,), "input_mix_weight_down": (4, 16), "input_mix_weight_up": (16, 4)}
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc_embedding.weight": (8, 8), "mtp.fc_hidden.weight": (8, 8), "mtp.pre_fc_norm_hidden.weight": (16,),
        **{f"mtp.hyper_connection_mixer.{name}.weight": shape for name, shape in mixer.items()},
        "mtp.layers.0.self_attn.indexer.index_qk_proj.weight": (12, 8),
    }  # fmt: skip
    with open_model(folder(tmp_path, "qwen4_exp_text", shapes, **_LINEAR, **_SPARSE)) as model:
        both = np.concatenate([numbers(8, 8), numbers(8, 8)], axis=1)
        np.testing.assert_array_equal(model.require("blk.3.nextn.eh_proj.weight").dequantise(), both)
        np.testing.assert_array_equal(model.require("blk.3.nextn.hnorm.weight").dequantise(), numbers(16) + 1)
        np.testing.assert_array_equal(model.require("blk.3.nextn.hc_head_norm.weight").dequantise(), numbers(16) + 1)
        assert {"blk.3.nextn.hc_head_down.weight", "blk.3.nextn.hc_head_up.weight", "blk.3.indexer.q_proj.weight",
                "blk.3.indexer.k_proj.weight"} < set(model.tensors)  # fmt: skip
        assert model.metadata["qwen4exp.nextn_predict_layers"] == 1


@pytest.mark.parametrize(("shapes", "named"), [
    ({"mtp.fc_embedding.weight": (8, 8)}, "fc_hidden"),
    ({"mtp.fc_embedding.weight": (8, 8), "mtp.fc_hidden.weight": (8, 16)}, "fc_hidden"),
])  # fmt: skip
def test_half_of_them_is_an_error(tmp_path: Path, shapes: dict[str, tuple[int, ...]], named: str) -> None:
    path = folder(tmp_path, "qwen4_exp_text", shapes, **_LINEAR, **_SPARSE)
    with pytest.raises(ModelFileError, match=named):
        open_model(path)


def test_deepseeks_layer_has_the_names_of_the_others_and_its_own(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (8,), "hnorm.weight": (8,), "eh_proj.weight": (8, 16), "embed_tokens.weight": (10, 8),
        "shared_head.norm.weight": (8,), "shared_head.head.weight": (10, 8),
        "self_attn.kv_b_proj.weight": (2 * (4 + 4), 4),
    }  # fmt: skip
    path = folder(tmp_path, "deepseek_v3", {f"model.layers.3.{n}": s for n, s in shapes.items()}, **_LATENT)
    with open_model(path) as model:
        assert (model.metadata["deepseek2.block_count"], model.metadata["deepseek2.nextn_predict_layers"]) == (4, 1)
        own = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head_norm", "shared_head_head")
        expected = {f"nextn.{name}" for name in own} | {"attn_k_b", "attn_v_b"}
        assert set(model.tensors) == {f"blk.3.{name}.weight" for name in expected}


def test_a_folder_without_such_a_layer_says_nothing_of_it(tmp_path: Path) -> None:
    with open_model(folder(tmp_path, "qwen3_5_text", {"model.norm.weight": (8,)}, **_LINEAR)) as model:
        assert "qwen35.nextn_predict_layers" not in model.metadata
        assert model.metadata["qwen35.block_count"] == 3
