"""Qwen 4 Exp: as Qwen 3.5, with hyper-connections, an indexer, and a table of n-gram embeddings in many pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.weights.derived import abreast, bits, joined, rearranged
from strata_core.weights.hf import hybrid
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.keys import layer_types
from strata_core.weights.hf.mapping import OUTER, ModelMapping, Scope, count_further, one_added
from strata_core.weights.hf.qwen import expert_stacks
from strata_core.weights.tensor import StoredTensor

_CONNECTION = {
    "hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject",
}  # fmt: skip
_LAYER = {
    **hybrid.LAYER,
    **{f"attn_hyper_connection.{there}": f"hc_attn_{here}" for there, here in _CONNECTION.items()},
    **{f"mlp_hyper_connection.{there}": f"hc_ffn_{here}" for there, here in _CONNECTION.items()},
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    **{f"mtp.hyper_connection_mixer.{there}": f"nextn.hc_head_{here}" for there, here in _CONNECTION.items()},
}
_OUTER = {**OUTER, **{f"hyper_connection_mixer.{there}": f"output_hc_{here}" for there, here in _CONNECTION.items()}}
#: Norms that are stored as their difference from one, though their names do not end like those of others.
_MORE_NORMS = ("ple.norm_key", "ple.norm_query", "ple.norm_conv")
#: Integers that are tensors there and keys here.
_HASHING = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
}
_PIECE = re.compile(r"ple\.ple_embedding\.ngram_embedding(\.shard_(?P<number>\d+))?\.weight")


def _metadata(config: Config) -> dict[str, object]:
    gate = config.get("output_gate_type", config.get("hidden_act", "silu"))
    if gate != "sigmoid":
        raise UnsupportedModel(f"{config.path}: gates by {gate!r} are not supported, only by 'sigmoid'",
                               param="output_gate_type")
    kinds = layer_types(config)
    keys = {
        **hybrid.mixture(config),
        "hyper_connection.count": config.require("hc_count", int),
        "hyper_connection.low_rank": config.require("hc_lowrank", int),
    }
    if "indexer_n_heads" in config:
        ratio = config.size("indexer_compress_ratio")
        keys |= {
            "attention.indexer.head_count": config.require("indexer_n_heads", int),
            "attention.indexer.key_length": config.require("indexer_head_dim", int),
            "attention.indexer.top_k": config.require("indexer_budget", int),
            "attention.indexer.block_size": ratio,
            "attention.compress_ratios": np.array([0 if k == "linear_attention" else ratio for k in kinds], np.int32),
        }
    layers: list[int] = config.get("ple_layer_ids", [])
    if len(layers) > 1:
        raise UnsupportedModel(f"{config.path}: n-gram embeddings in several layers", param="ple_layer_ids")
    if layers:
        keys |= {
            "ple.layers": np.array([_place(config, layer) for layer in layers], np.int32),
            "ple.ngram_size": config.require("ngram_size", int),
            "ple.heads_per_ngram": config.require("heads_per_ngram", int),
            "ple.conv_kernel": config.require("ple_conv_kernel_size", int),
            "ple.eos_token_id": _end(config),
        }
        if "image_token_id" in config:
            keys["ple.image_token_id"] = config.require("image_token_id", int)
    return keys


def _place(config: Config, layer: object) -> int:
    """A layer's number; there they are counted from one."""
    if type(layer) is not int or not 0 < layer <= config.size("num_hidden_layers"):
        raise ModelFileError(f"{config.path}: ple_layer_ids names layer {layer!r:.20}", param="ple_layer_ids")
    return layer - 1


def _end(config: Config) -> int:
    """The token at which n-grams begin anew: of several, the first."""
    key = "eos_token_id"
    several = config.any(key)
    if isinstance(several, list) and several and type(several[0]) is int:
        return several[0]
    return config.require(key, int)


def _change(scope: Scope) -> Iterable[StoredTensor]:
    count_further(scope)
    yield from _entrance(scope)
    yield from hybrid.tiled_layer(scope)
    yield from expert_stacks(scope)
    yield from hybrid.norms(scope, _LAYER)
    yield from one_added(scope, {name: _LAYER[name] for name in _MORE_NORMS}, always=True)
    joint = scope.optional("self_attn.indexer.index_qk_proj.weight", 2)
    if joint is not None:
        config = scope.config
        queries = config.require("indexer_n_heads", int) * config.require("indexer_head_dim", int)
        array = bits(joint)
        yield rearranged(f"{scope.prefix}indexer.q_proj.weight", array[:queries], joint.type)
        yield rearranged(f"{scope.prefix}indexer.k_proj.weight", array[queries:], joint.type)
    yield from hybrid.squeezed(scope, "ple.conv1d", "ple_conv1d")
    yield from _table(scope)


def _entrance(scope: Scope) -> Iterable[StoredTensor]:
    """The matrices of a token's embedding and of the hidden row, whose results are added, are one of both here."""
    if "mtp.fc_embedding.weight" not in scope:
        return
    parts = [scope.take(f"mtp.fc_{name}.weight") for name in ("embedding", "hidden")]
    if len(parts[0].shape) != 2 or (parts[0].shape, parts[0].type) != (parts[1].shape, parts[1].type):
        raise scope.wrong(parts[1], f"differs from that of fc_embedding, {parts[0].shape}")
    yield abreast(f"{scope.prefix}nextn.eh_proj.weight", parts)


def _table(scope: Scope) -> Iterable[StoredTensor]:
    """The n-gram table, its pieces below each other in order of their numbers, and the numbers that find a row."""
    for there, here in _HASHING.items():
        tensor = scope.optional(f"ple.ple_embedding.{there}")
        if tensor is not None:
            if tensor.type != "I64":
                raise scope.wrong(tensor, f"is of type {tensor.type}, not I64")
            scope.keys[f"ple.{here}"] = np.array(tensor.data.view("<i8"))
    pieces = {}
    for name in scope.names():
        match = _PIECE.fullmatch(name)
        if match:
            piece = scope.optional(name, 2)
            assert piece is not None  # it was just named
            pieces[int(match["number"] or 0)] = piece
    if not pieces:
        return
    ordered = [pieces.get(number) for number in range(max(pieces) + 1)]
    found = [piece for piece in ordered if piece is not None]
    if len(found) != len(ordered):
        problem = f"piece {ordered.index(None)} of the n-gram table is missing"
        raise ModelFileError(f"{scope.config.path.parent}: {problem}", param="per_layer_token_embd.weight")
    for piece in found:
        if (piece.shape[1], piece.type) != (found[0].shape[1], found[0].type):
            raise scope.wrong(piece, f"differs from that of piece 0, {found[0].shape}")
    scope.keys["embedding_length_per_layer_input"] = found[0].shape[1]
    yield joined("per_layer_token_embd.weight", found)


def _outer(scope: Scope) -> Iterable[StoredTensor]:
    return hybrid.norms(scope, _OUTER)


MAPPING = ModelMapping(
    ("qwen4_exp", "qwen4_exp_text"), "qwen4exp", _metadata, _LAYER, _OUTER, _change, _outer, hybrid.IGNORED,
    hybrid.place,
)  # fmt: skip
