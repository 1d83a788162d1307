"""Tiny random hybrid models of ``transformers``, saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers

VOCAB = 96

#: The epsilon is larger than published models have: with 1e-6, norms of small numbers, which heads of the delta rule
#: may give, blow up the last bits of sums, which differ between processors, to 1e-4 of a logit; in theirs as in ours.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, linear_key_head_dim=16, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=6, linear_conv_kernel_dim=4, pad_token_id=None, bos_token_id=None, rms_norm_eps=1e-3,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=24,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_SPARSE: dict[str, Any] = dict(
    indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=12, indexer_compress_ratio=4,
    hc_count=4, hc_lowrank=24, output_gate_type="sigmoid", eos_token_id=5, rope_parameters=_ROPE,
    ple_layer_ids=[2], ple_embed_dim=48, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=50,
    make_ngram_vocab_size_divisible_by=8, split_ngram_parts=4,
)  # fmt: skip


@attrs.frozen
class Hybrid:
    """:ivar make: the model, still with the weights that it is initialised with."""

    name: str
    make: Callable[[], Any] = attrs.field(repr=False)


def _hybrid(name: str, model: str, **fields: Any) -> Hybrid:
    def make() -> Any:
        config = getattr(transformers, model.replace("ForCausalLM", "TextConfig"), None)
        config = config or getattr(transformers, model.replace("ForCausalLM", "Config"))
        return getattr(transformers, model)(config(**{**_COMMON, **fields}))

    return Hybrid(name, make)


HYBRIDS = (
    _hybrid("qwen3_next", "Qwen3NextForCausalLM", **_EXPERTS, rope_parameters=_ROPE),
    _hybrid("qwen3_next-unnormalised", "Qwen3NextForCausalLM", **_EXPERTS, norm_topk_prob=False),
    _hybrid("qwen3_5", "Qwen3_5ForCausalLM", intermediate_size=48),
    _hybrid("qwen3_5-tied", "Qwen3_5ForCausalLM", intermediate_size=48, tie_word_embeddings=True,
            linear_num_value_heads=2, rope_parameters=_ROPE),
    _hybrid("qwen3_5_moe", "Qwen3_5MoeForCausalLM", **_EXPERTS),
    _hybrid("qwen4_exp", "Qwen4ExpForCausalLM", **_EXPERTS, **_SPARSE),
    _hybrid("qwen4_exp-bigrams", "Qwen4ExpForCausalLM", **_EXPERTS,
            **_SPARSE | {"ngram_size": 2, "ple_layer_ids": [1], "hc_count": 2, "indexer_compress_ratio": 6}),
    _hybrid("qwen4_exp-plain", "Qwen4ExpForCausalLM", **_EXPERTS, **_SPARSE | {"ple_layer_ids": []}),
)  # fmt: skip


def saved(hybrid: Hybrid, path: Path) -> Any:
    """The model with random weights, which are in the folder too.

    Gains let what any layer adds change the logits by far more than the tests allow.
    """
    torch.manual_seed(3)
    model = hybrid.make().float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.02, 1.0).log_()
            elif "norm" in name or "dt_bias" in name:
                parameter.add_(0.4 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                parameter.normal_(0, 0.25 if model.config.tie_word_embeddings else 0.5)
            else:
                gain = 0.5 if name.endswith(("out_proj.weight", "o_proj.weight")) else 1.3
                parameter.normal_(0, gain / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return model
