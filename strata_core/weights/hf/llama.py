"""Llama and its like: the rows of q and k are put in the order in which a rotated pair is two neighbours."""

from __future__ import annotations

from collections.abc import Iterable

from strata_core.errors import UnsupportedModel
from strata_core.weights.derived import bits, rearranged
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward
from strata_core.weights.hf.mapping import LAYER, ModelMapping, Scope
from strata_core.weights.tensor import StoredTensor


def _metadata(config: Config) -> dict[str, object]:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.path}: hidden_act {activation!r} is not supported", param="hidden_act")
    if config.get("sliding_window", 0) and config.require("model_type", str) == "mistral":
        raise UnsupportedModel(f"{config.path}: sliding_window is not supported for mistral", param="sliding_window")
    return {**common(config), **feed_forward(config)}


def neighbours(tensor: StoredTensor, name: str, heads: int) -> StoredTensor:
    """Rows of a projection with the halves of each head interleaved: pair i is rows 2i, 2i + 1, not i, i + d/2."""
    array = bits(tensor)
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2)
    return rearranged(name, halves, tensor.type, lead=3)


def _change(scope: Scope) -> Iterable[StoredTensor]:
    heads = scope.config.size("num_attention_heads")
    for part, count in ("q", heads), ("k", scope.config.size("num_key_value_heads", heads)):
        for suffix in "weight", "bias":
            tensor = scope.optional(f"self_attn.{part}_proj.{suffix}")
            if tensor is None:
                continue
            if tensor.shape[0] % (2 * count):
                raise scope.wrong(tensor, f"does not have an even number of rows for each of {count} heads")
            yield neighbours(tensor, f"{scope.prefix}attn_{part}.{suffix}", count)


MAPPING = ModelMapping(
    ("llama", "mistral"), "llama", _metadata, LAYER, change=_change, ignored=r".*\.rotary_emb\.inv_freq"
)
