"""Metadata keys that most architectures share, from a ``config.json``."""

from __future__ import annotations

import math
from typing import TypeVar

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.weights.hf.config import Config

K = TypeVar("K")

#: Names of rotary scaling types: there and here.
_SCALINGS = {"linear": "linear", "yarn": "yarn", "llama3": "llama3"}
_NO_SCALING = ("default", "none", "mrope", "proportional")


def head_dim(config: Config) -> int:
    """Width of a head: what the file says, or its share of the model's width."""
    if "head_dim" in config:
        return config.size("head_dim")
    return config.size("hidden_size") // config.size("num_attention_heads")


def refuse(config: Config, key: str, value: K) -> None:
    """:raises UnsupportedModel: the key is there with another value than the only one that is computed."""
    found = config.get(key, value)
    if found != value:
        raise UnsupportedModel(f"{config.path}: {key} {found!r} is not supported, only {value!r}", param=key)


def layer_types(config: Config) -> list[str]:
    """The kind of each layer; empty where the file does not say.

    :raises ModelFileError: there are more or fewer than layers.
    """
    kinds: list[str] = config.get("layer_types", [])
    layers = config.require("num_hidden_layers", int)
    if kinds and len(kinds) != layers:
        raise ModelFileError(f"{config.path}: layer_types has {len(kinds)} for {layers} layers", param="layer_types")
    return kinds


def common(
    config: Config, *, rotated: int | None = None, share: float = 1.0, truncated: bool = True
) -> dict[str, object]:
    """Sizes, norm and rotation of a decoder with grouped-query attention.

    :param rotated: rotated elements of a head; None takes the share that the file says, or ``share`` where it does not.
    :param truncated: see :func:`rope`.
    """
    heads = config.size("num_attention_heads")
    width = head_dim(config)
    if rotated is None:
        share = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor", share))
        if not 0 < share <= 1:
            raise ModelFileError(f"{config.path}: partial_rotary_factor is {share}", param="partial_rotary_factor")
        rotated = int(width * share)
    return {
        "block_count": config.size("num_hidden_layers"),
        "context_length": config.size("max_position_embeddings"),
        "embedding_length": config.size("hidden_size"),
        "vocab_size": config.size("vocab_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.size("num_key_value_heads", heads),
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.require("rms_norm_eps", float),
        "rope.dimension_count": rotated,
        **rope(config, rope_parameters(config), truncated=truncated),
    }


def feed_forward(config: Config) -> dict[str, object]:
    """The width of feed-forward blocks that are no experts."""
    return {"feed_forward_length": config.size("intermediate_size")}


def rope_parameters(config: Config) -> Config:
    """What the file says about the rotation, whether in the present form or that before ``rope_parameters``."""
    if "rope_parameters" in config:
        return config.part("rope_parameters")
    return config.part("rope_scaling")


def rope(
    config: Config, parameters: Config, *, base: float = 10_000.0, truncated: bool = True
) -> dict[str, object]:
    """Base and scaling of the rotary frequencies.

    :param base: where the file has none.
    :param truncated: whether the architecture's yarn rounds the ends of its ramp to whole pairs.

    :raises UnsupportedModel: a scaling type that is not known here.
    """
    base = parameters.get("rope_theta", config.get("rope_theta", base))
    keys: dict[str, object] = {"rope.freq_base": base}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in _NO_SCALING:
        return keys
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise UnsupportedModel(
            f"{config.path}: rope_type {kind!r} is not supported; known: {known}", param="rope_type"
        )
    factor = parameters.require("factor", float)
    original = parameters.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings", 0)
    ) or config.require("max_position_embeddings", int)
    keys |= {
        "rope.scaling.type": _SCALINGS[kind],
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    if kind == "yarn":
        refuse(parameters, "truncate", truncated)
        keys |= _yarn(parameters, factor)
    if kind == "llama3":
        keys["rope.scaling.low_freq_factor"] = parameters.require("low_freq_factor", float)
        keys["rope.scaling.high_freq_factor"] = parameters.require("high_freq_factor", float)
    return keys


def _yarn(parameters: Config, factor: float) -> dict[str, object]:
    keys: dict[str, object] = {
        "rope.scaling.yarn_beta_fast": parameters.get("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": parameters.get("beta_slow", 1.0),
    }
    # Here the magnitude is a factor on what follows from the stretching; there it may be given whole.
    whole = parameters.get("attention_factor", None, float)
    mscale, mscale_all = parameters.get("mscale", 0.0), parameters.get("mscale_all_dim", 0.0)
    if whole is None and mscale and mscale_all:
        whole = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    if whole is not None:
        keys["rope.scaling.attn_factor"] = whole / _magnitude(factor, 1.0)
    return keys


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

