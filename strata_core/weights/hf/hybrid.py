"""Qwen 3 Next and 3.5: gated delta rule in most layers, gated attention in the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.weights.derived import Bits, bits, computed, joined, rearranged, renamed
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import common, feed_forward, layer_types, refuse, rope_parameters
from strata_core.weights.hf.mapping import OUTER, ModelMapping, Scope, count_further, one_added
from strata_core.weights.hf.qwen import MOE, expert_stacks, experts, only_experts
from strata_core.weights.tensor import StoredTensor

LAYER = {
    **MOE,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
IGNORED = r"(model\.)?visual\..*"
#: Norms that are stored as their difference from one, though their names do not end like those of others.
_MORE_NORMS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
#: Tensors of layers that predict further tokens; those without a number belong to the first.
_FURTHER = re.compile(r"mtp\.(layers\.(?P<number>\d+)\.)?(?P<name>.+)")
#: Shares of a rotated head's pairs for time, height and width, where the file has none; text has all three equal.
_SECTIONS = (11, 11, 10)


class Delta:
    """Sizes of the gated delta rule.

    :ivar k_heads: key heads; :ivar per: value heads for each; :ivar k_dim: width of a key; :ivar v_dim: of a value.
    """

    def __init__(self, config: Config):
        self.k_heads = config.size("linear_num_key_heads")
        self.v_heads = config.size("linear_num_value_heads")
        self.k_dim = config.size("linear_key_head_dim")
        self.v_dim = config.size("linear_value_head_dim")
        if self.v_heads % self.k_heads:
            problem = f"{self.v_heads} value heads cannot share {self.k_heads} key heads evenly"
            raise UnsupportedModel(f"{config.path}: {problem}", param="linear_num_value_heads")
        self.per = self.v_heads // self.k_heads

    def keys(self, config: Config) -> dict[str, object]:
        """The ``ssm`` keys."""
        return {
            "ssm.conv_kernel": config.require("linear_conv_kernel_dim", int),
            "ssm.state_size": self.k_dim,
            "ssm.group_count": self.k_heads,
            "ssm.time_step_rank": self.v_heads,
            "ssm.inner_size": self.v_heads * self.v_dim,
        }


def hybrid(config: Config) -> dict[str, object]:
    """Keys of a model with both kinds of layers."""
    kinds, declared = layer_types(config), config.size("full_attention_interval", 4)
    sees_all = [kind != "linear_attention" for kind in kinds]
    interval = sees_all.index(True) + 1 if any(sees_all) else declared
    if sees_all != [(number + 1) % interval == 0 for number in range(len(kinds))]:
        raise UnsupportedModel(f"{config.path}: layer_types do not repeat; that is not supported", param="layer_types")
    return {
        **common(config, share=0.25),
        **Delta(config).keys(config),
        "full_attention_interval": interval,
    }


def sections(config: Config) -> dict[str, object]:
    """How the rotated pairs are shared between time, height and width."""
    given = rope_parameters(config).get("mrope_section", list(_SECTIONS))
    if any(type(size) is not int or not 0 <= size < 1 << 31 for size in given):
        raise ModelFileError(f"{config.path}: mrope_section is {given!r:.80}", param="mrope_section")
    return {"rope.dimension_sections": np.array([*given, 0][:4], np.int32)}


def _next(config: Config) -> dict[str, object]:
    only_experts(config)
    norm = config.get("norm_topk_prob", True)
    return {**hybrid(config), **feed_forward(config), **experts(config), "expert_weights_norm": norm}


def _dense(config: Config) -> dict[str, object]:
    return {**hybrid(config), **sections(config), **feed_forward(config)}


def mixture(config: Config) -> dict[str, object]:
    """Keys of a hybrid model with experts in all layers."""
    refuse(config, "norm_topk_prob", True)
    return {**hybrid(config), **sections(config), **experts(config)}


def norms(scope: Scope, names: Mapping[str, str]) -> Iterable[StoredTensor]:
    """All norms but the gated one, whose weight is stored as it is used."""
    yield from one_added(scope, names, but=("linear_attn.norm",))
    yield from one_added(scope, {name: names[name] for name in _MORE_NORMS if name in names}, always=True)


def place(config: Config, name: str) -> str:
    """Layers that predict further tokens are behind the others; names that only they have keep their ``mtp.``."""
    match = _FURTHER.fullmatch(name)
    if match is None:
        return name
    number = config.require("num_hidden_layers", int) + int(match["number"] or 0)
    return f"layers.{number}.{match['name'] if match['number'] else name}"


def _next_layer(scope: Scope) -> Iterable[StoredTensor]:
    """Here the rows of a key head's q, k, v and z are together; they are sorted by kind."""
    count_further(scope)
    joint = scope.optional("linear_attn.in_proj_qkvz.weight", 2)
    if joint is not None:
        d = Delta(scope.config)
        group = 2 * d.k_dim + 2 * d.per * d.v_dim
        if joint.shape[0] != d.k_heads * group:
            raise scope.wrong(joint, f"does not have {group} rows for each of {d.k_heads} key heads")
        array = bits(joint).reshape(d.k_heads, group, joint.shape[1])
        edges = np.cumsum([0, d.k_dim, d.k_dim, d.per * d.v_dim, d.per * d.v_dim]).tolist()
        q, k, v, z = (
            rearranged(f"{scope.prefix}attn_gate.weight", array[:, a:b], joint.type, lead=2)
            for a, b in pairwise(edges)
        )
        yield joined(f"{scope.prefix}attn_qkv.weight", [q, k, v])
        yield z
    yield from squeezed(scope, "linear_attn.conv1d", "ssm_conv1d")
    decay = scope.optional("linear_attn.A_log")
    if decay is not None:
        yield _decay(scope, decay)
    yield from expert_stacks(scope)
    yield from norms(scope, LAYER)


def squeezed(scope: Scope, there: str, here: str) -> Iterable[StoredTensor]:
    """The weights of a convolution of each channel by itself, without the dimension of the channels that it mixes."""
    kernel = scope.optional(f"{there}.weight", 3)
    if kernel is not None:
        if kernel.shape[1] != 1:
            raise scope.wrong(kernel, "is not of a convolution of each channel by itself")
        yield renamed(kernel, f"{scope.prefix}{here}.weight", (kernel.shape[0], kernel.shape[2]))


def _decay(scope: Scope, tensor: StoredTensor) -> StoredTensor:
    return computed(f"{scope.prefix}ssm_a", tensor, lambda values: -np.exp(values))


def tiled_layer(scope: Scope) -> Iterable[StoredTensor]:
    """Value heads are together by the key head that they share; here they are in turns: head ``v`` uses key head
    ``v % k_heads``. That concerns rows of all projections that end in value heads, and columns of the last one."""
    d = Delta(scope.config)
    before = 2 * d.k_heads * d.k_dim

    def rows(name: str, array: Bits, type: str, width: int) -> StoredTensor:
        heads = array.reshape(d.k_heads, d.per, width, *array.shape[1:]).swapaxes(0, 1)
        return rearranged(scope.prefix + name, heads, type, lead=3)

    for there, here, fixed, width in _VALUE_ROWS:
        tensor = scope.optional(f"linear_attn.{there}")
        if tensor is None:
            continue
        first, width = fixed * before, width or d.v_dim
        if tensor.shape[0] != first + d.v_heads * width:
            raise scope.wrong(tensor, f"does not have {first + d.v_heads * width} rows")
        array = bits(tensor).reshape(tensor.shape[0], *(size for size in tensor.shape[1:] if size > 1 or not fixed))
        sorted_rows = rows(here, array[first:], tensor.type, width)
        if there == "A_log":
            yield _decay(scope, sorted_rows)
        elif fixed:
            before_them = rearranged(scope.prefix + here, array[:first], tensor.type)
            yield joined(scope.prefix + here, [before_them, sorted_rows])
        else:
            yield sorted_rows
    out = scope.optional("linear_attn.out_proj.weight", 2)
    if out is not None:
        if out.shape[1] != d.v_heads * d.v_dim:
            raise scope.wrong(out, f"does not have {d.v_heads * d.v_dim} columns")
        heads = bits(out).reshape(out.shape[0], d.k_heads, d.per, d.v_dim).swapaxes(1, 2)
        yield rearranged(f"{scope.prefix}ssm_out.weight", heads, out.type, shape=out.shape)


#: Tensors whose rows are value heads: name there, here, whether rows of q and k are before, rows of a head (0: v_dim).
_VALUE_ROWS = (
    ("in_proj_qkv.weight", "attn_qkv.weight", 1, 0),
    ("conv1d.weight", "ssm_conv1d.weight", 1, 0),
    ("in_proj_z.weight", "attn_gate.weight", 0, 0),
    ("in_proj_a.weight", "ssm_alpha.weight", 0, 1),
    ("in_proj_b.weight", "ssm_beta.weight", 0, 1),
    ("dt_bias", "ssm_dt.bias", 0, 1),
    ("A_log", "ssm_a", 0, 1),
)


def _tiled(scope: Scope) -> Iterable[StoredTensor]:
    count_further(scope)
    yield from tiled_layer(scope)
    yield from expert_stacks(scope)
    yield from norms(scope, LAYER)


def _outer(scope: Scope) -> Iterable[StoredTensor]:
    return norms(scope, OUTER)


MAPPINGS = (
    ModelMapping(
        ("qwen3_next",), "qwen3next", _next, LAYER, change=_next_layer, change_outer=_outer, ignored=IGNORED,
        place=place,
    ),
    ModelMapping(
        ("qwen3_5", "qwen3_5_text"), "qwen35", _dense, LAYER, change=_tiled, change_outer=_outer, ignored=IGNORED,
        place=place,
    ),
    ModelMapping(
        ("qwen3_5_moe", "qwen3_5_moe_text"), "qwen35moe", mixture, LAYER, change=_tiled, change_outer=_outer,
        ignored=IGNORED, place=place,
    ),
)  # fmt: skip
