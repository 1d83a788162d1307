"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strata_core.errors import UnsupportedModel
from strata_core.weights.derived import bits, rearranged, renamed
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward, layer_types, refuse
from strata_core.weights.hf.mapping import LAYER, ModelMapping, Scope, stack_experts
from strata_core.weights.tensor import StoredTensor

NORMED = {**LAYER, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
MOE = {
    **NORMED,
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def _dense(config: Config) -> dict[str, object]:
    refuse(config, "use_sliding_window", False)
    if "sliding_attention" in layer_types(config):
        raise UnsupportedModel(f"{config.path}: layers with a sliding window are not supported", param="layer_types")
    return {**common(config), **feed_forward(config)}


def experts(config: Config) -> dict[str, object]:
    """Keys of a mixture of experts."""
    count = config.get("num_experts", 0) or config.require("num_local_experts", int)
    keys: dict[str, object] = {
        "expert_count": count,
        "expert_used_count": config.require("num_experts_per_tok", int),
        "expert_feed_forward_length": config.require("moe_intermediate_size", int),
    }
    if config.get("shared_expert_intermediate_size", 0):
        keys["expert_shared_feed_forward_length"] = config.require("shared_expert_intermediate_size", int)
    return keys


def only_experts(config: Config) -> None:
    """:raises UnsupportedModel: some layers have experts and some have not."""
    if config.get("mlp_only_layers", []) or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel(
            f"{config.path}: layers without experts beside layers with them are not supported", param="mlp_only_layers"
        )


def _moe(config: Config) -> dict[str, object]:
    only_experts(config)
    return {**_dense(config), **experts(config), "expert_weights_norm": config.get("norm_topk_prob", False)}


def expert_stacks(scope: Scope) -> Iterable[StoredTensor]:
    """The experts' matrices, whether the file has each by itself or all in one."""
    yield from stack_experts(scope, EXPERTS)
    both = scope.optional("mlp.experts.gate_up_proj", 3)
    if both is not None:
        array, half = bits(both), both.shape[1] // 2
        yield rearranged(f"{scope.prefix}ffn_gate_exps.weight", array[:, :half], both.type)
        yield rearranged(f"{scope.prefix}ffn_up_exps.weight", array[:, half:], both.type)
    down = scope.optional("mlp.experts.down_proj", 3)
    if down is not None:
        yield renamed(down, f"{scope.prefix}ffn_down_exps.weight")


def _mapping(model_type: str, architecture: str, layer: Mapping[str, str]) -> ModelMapping:
    return ModelMapping((model_type,), architecture, _dense, layer)


MAPPINGS = (
    _mapping("qwen2", "qwen2", LAYER),
    _mapping("qwen3", "qwen3", NORMED),
    ModelMapping(("qwen3_moe",), "qwen3moe", _moe, MOE, change=expert_stacks),
)
