"""DeepSeek V3: keys and values are expanded from a latent row by two matrices, which the file holds as one."""

from __future__ import annotations

from collections.abc import Iterable

from strata_core.weights.derived import bits, rearranged
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward, refuse, rope_parameters
from strata_core.weights.hf.mapping import LAYER, ModelMapping, Scope, count_further, stack_experts
from strata_core.weights.hf.qwen import EXPERTS
from strata_core.weights.tensor import StoredTensor

_LAYER = {
    **LAYER,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
#: ``expert_gating_func``: weights of experts by sigmoid.
_SIGMOID = 2


def _metadata(config: Config) -> dict[str, object]:
    refuse(config, "rope_interleave", True)
    refuse(config, "scoring_func", "sigmoid")
    refuse(config, "moe_layer_freq", 1)
    latent, rotated = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    keys: dict[str, object] = {
        **common(config, rotated=rotated),
        **feed_forward(config),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config.require("qk_nope_head_dim", int) + rotated,
        "attention.value_length_mla": config.require("v_head_dim", int),
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "expert_count": config.require("n_routed_experts", int),
        "expert_used_count": config.require("num_experts_per_tok", int),
        "expert_shared_count": config.get("n_shared_experts", 0),
        "expert_feed_forward_length": config.require("moe_intermediate_size", int),
        "expert_group_count": config.get("n_group", 1),
        "expert_group_used_count": config.get("topk_group", 1),
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_weights_scale": config.get("routed_scaling_factor", 1.0),
    }
    if "q_lora_rank" in config:
        keys["attention.q_lora_rank"] = config.require("q_lora_rank", int)
    everywhere = rope_parameters(config).get("mscale_all_dim", 0.0)
    if everywhere:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * everywhere
    return keys


def _change(scope: Scope) -> Iterable[StoredTensor]:
    config = scope.config
    count_further(scope)
    yield from stack_experts(scope, EXPERTS)
    both = scope.optional("self_attn.kv_b_proj.weight", 2)
    if both is None:
        return
    heads, plain = config.require("num_attention_heads", int), config.require("qk_nope_head_dim", int)
    rows = plain + config.require("v_head_dim", int)
    if both.shape[0] != heads * rows:
        raise scope.wrong(both, f"does not have {rows} rows for each of {heads} heads")
    array = bits(both).reshape(heads, rows, both.shape[1])
    yield rearranged(f"{scope.prefix}attn_k_b.weight", array[:, :plain].swapaxes(1, 2), both.type)
    yield rearranged(f"{scope.prefix}attn_v_b.weight", array[:, plain:], both.type)


MAPPING = ModelMapping(
    ("deepseek_v3",), "deepseek2", _metadata, _LAYER, change=_change, ignored=r".*\.rotary_emb\.inv_freq"
)
