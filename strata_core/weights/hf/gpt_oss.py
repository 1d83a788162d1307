"""gpt-oss: experts in MXFP4 or plain, gate and up in turns; sinks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from strata_core.errors import UnsupportedModel
from strata_core.weights.derived import bits, rearranged
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward, layer_types, refuse
from strata_core.weights.hf.mapping import LAYER, ModelMapping, Scope
from strata_core.weights.quant.base import Bytes
from strata_core.weights.tensor import StoredTensor

_LAYER = {
    **LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
#: Every other row of the joint matrix is a gate's.
_PARTS = {"gate_up_proj": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}, "down_proj": {"down": slice(None)}}


def _metadata(config: Config) -> dict[str, object]:
    refuse(config, "swiglu_alpha", 1.702)
    refuse(config, "swiglu_limit", 7.0)
    kinds = layer_types(config)
    if kinds and kinds != [("sliding_attention", "full_attention")[n % 2] for n in range(len(kinds))]:
        raise UnsupportedModel(f"{config.path}: layer_types do not alternate; not supported", param="layer_types")
    return {
        **common(config, truncated=False),
        **feed_forward(config),
        "attention.sliding_window": config.require("sliding_window", int),
        "expert_count": config.get("num_local_experts", 0) or config.require("num_experts", int),
        "expert_used_count": config.require("num_experts_per_tok", int),
        "expert_feed_forward_length": config.require("intermediate_size", int),
    }


def _experts(scope: Scope) -> Iterable[StoredTensor]:
    for joint, parts in _PARTS.items():
        there = f"mlp.experts.{joint}"
        blocks, whole = scope.optional(f"{there}_blocks", 4), scope.optional(there, 3)
        bias = scope.optional(f"{there}_bias", 2)
        scales = scope.take(f"{there}_scales") if blocks is not None else None
        for part, rows in parts.items():
            here = f"{scope.prefix}ffn_{part}_exps"
            if blocks is not None and scales is not None:
                yield _mxfp4(scope, f"{here}.weight", blocks, scales, rows)
            if whole is not None:  # stored as (experts, in, out)
                yield rearranged(f"{here}.weight", bits(whole)[:, :, rows].swapaxes(1, 2), whole.type)
            if bias is not None:
                yield rearranged(f"{here}.bias", bits(bias)[:, rows], bias.type)


def _mxfp4(scope: Scope, name: str, blocks: StoredTensor, scales: StoredTensor, rows: slice) -> StoredTensor:
    """Scales ``(experts, out, in / 32)`` and codes ``(experts, out, in / 32, 16)`` as MXFP4 blocks."""
    if blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise scope.wrong(blocks, f"is not made of blocks with the scales of {scales.name}, {scales.shape}")
    codes, exponents = bits(blocks)[:, rows], bits(scales)[:, rows]

    def read(start: int, stop: int) -> Bytes:
        out = np.empty((*codes[start:stop].shape[:3], 17), np.uint8)
        out[..., 0] = exponents[start:stop]
        _halves_apart(codes[start:stop], out[..., 1:])
        return out.reshape(-1)

    return StoredTensor(name, (*codes.shape[:2], 32 * codes.shape[2]), "MXFP4", read)


def _halves_apart(there: NDArray[np.uint8], here: NDArray[np.uint8]) -> None:
    """Byte i has elements 2i and 2i + 1 there, elements i and i + 16 here."""
    low, high = there & 15, there >> 4
    here[..., 0::2] = low[..., :8] | low[..., 8:] << 4
    here[..., 1::2] = high[..., :8] | high[..., 8:] << 4


MAPPING = ModelMapping(("gpt_oss",), "gpt-oss", _metadata, _LAYER, change=_experts, quantisation="mxfp4")
