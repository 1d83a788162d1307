"""Gemma 3: norms are stored as their difference from one, and only every sixth layer sees everything."""

from __future__ import annotations

from collections.abc import Iterable

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward, layer_types, refuse, rope
from strata_core.weights.hf.mapping import LAYER, OUTER, ModelMapping, Scope, one_added
from strata_core.weights.tensor import StoredTensor

_LAYER = {
    **LAYER,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _metadata(config: Config) -> dict[str, object]:
    config = config.with_defaults(_DEFAULTS)
    refuse(config, "use_bidirectional_attention", False)
    refuse(config, "hidden_activation", "gelu_pytorch_tanh")
    scalar = config.get("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        raise ModelFileError(f"{config.path}: query_pre_attn_scalar is {scalar}", param="query_pre_attn_scalar")
    keys: dict[str, object] = {
        **common(config),
        **feed_forward(config),
        **_ropes(config),
        "attention.scale": scalar**-0.5,
        "attention.sliding_window": config.get("sliding_window", 4096),
        "attention.sliding_window_pattern": _pattern(config),
    }
    for key in "attn_logit_softcapping", "final_logit_softcapping":
        if key in config:
            keys[key] = config.require(key, float)
    return keys


#: What the text part of larger models may leave out.
_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _pattern(config: Config) -> int:
    """Every how many layers one sees everything."""
    declared = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    layers = config.size("num_hidden_layers")
    kinds = layer_types(config)
    if not kinds:
        return declared
    sees_all = [kind == "full_attention" for kind in kinds]
    first = sees_all.index(True) + 1 if any(sees_all) else layers + 1
    for period in (declared, first):
        if sees_all == [(number + 1) % period == 0 for number in range(layers)]:
            return period
    raise UnsupportedModel(f"{config.path}: layer_types do not repeat; that is not supported", param="layer_types")


def _ropes(config: Config) -> dict[str, object]:
    """Rotation of layers that see everything, and the base of those that do not."""
    parameters = config.part("rope_parameters")
    if "full_attention" in parameters:
        near = rope(config, parameters.part("sliding_attention"), base=10_000.0)
        if len(near) > 1:
            raise UnsupportedModel(f"{config.path}: scaled rotation in sliding layers", param="rope_parameters")
        far = rope(config, parameters.part("full_attention"), base=1_000_000.0)
        return {**far, "rope.freq_base_swa": near["rope.freq_base"]}
    far = rope(config, config.part("rope_scaling"), base=config.get("rope_theta", 1_000_000.0))
    return {**far, "rope.freq_base_swa": config.get("rope_local_base_freq", 10_000.0)}


def _norms(scope: Scope) -> Iterable[StoredTensor]:
    return one_added(scope, _LAYER if scope.layer is not None else OUTER)


MAPPING = ModelMapping(
    ("gemma3", "gemma3_text"), "gemma3", _metadata, _LAYER, change=_norms, change_outer=_norms,
    ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)  # fmt: skip
