"""Tiny random models with recurrent layers, complete like those of :mod:`strata_core.testing.tiny`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.tiny import CHATML, tokenizer_keys

Arrays = dict[str, NDArray[np.float32]]

#: Sizes of both kinds of tiny models. Rows of matrices are multiples of 32, so that they can be quantised in blocks.
WIDTH, HEADS, KV_HEADS, HEAD_DIM, ROTATED = 64, 4, 2, 16, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 16, 16, 4
EXPERTS, TOP, FFN = 8, 2, 32
STREAMS, RANK = 4, 32
INDEX_HEADS, INDEX_DIM, INDEX_BLOCK = 4, 16, 4
#: Rows of the table of n-grams for each of its heads, those of order 2 first; and their width.
NGRAM_SIZES, NGRAM_WIDTH = (101, 103, 107, 109), 16


def tiny_hybrid(
    path: str | Path,
    *,
    seed: int = 0,
    architecture: str = "qwen3next",
    layers: int = 4,
    interval: int = 2,
    context: int = 512,
    vocab: int = 384,
    weights: str = "F32",
    template: str | None = CHATML,
    metadata: Mapping[str, object] | None = None,
    further: int = 0,
) -> Path:
    """Write a GGUF of gated delta nets and gated attention with random weights; equal arguments give equal bytes.

    :param architecture: ``qwen3next`` or ``qwen35moe`` (both with experts), or ``qwen35`` (dense).
    :param interval: every so many layers one attends.
    :param weights: type of the matrices, as in :func:`~strata_core.testing.tiny.tiny_llama`.
    :param metadata: further entries; they replace what this function would write, and a None leaves that out.
    :param further: so many layers behind the others predict further tokens.
    """
    random = _Random(seed)
    keys = _keys(architecture, seed, layers, interval, context, vocab, template)
    keys |= counted(architecture, layers, further)
    if architecture == "qwen35":
        keys[f"{architecture}.feed_forward_length"] = FFN
    else:
        keys |= mixture_keys(architecture)
    tensors: Arrays = {"token_embd.weight": random.matrix(vocab, WIDTH), "output_norm.weight": random.norm(WIDTH)}
    tensors["output.weight"] = random.matrix(vocab, WIDTH)
    for number in range(layers):
        block: Arrays = {"attn_norm": random.norm(WIDTH), "post_attention_norm": random.norm(WIDTH)}
        attends = (number + 1) % interval == 0
        block |= random.attention() if attends else random.delta_net(joint=architecture == "qwen3next")
        block |= random.dense("", FFN) if architecture == "qwen35" else random.mixture()
        tensors |= named(number, block)
    for number in range(layers, layers + further):
        block = {"attn_norm": random.norm(WIDTH), "post_attention_norm": random.norm(WIDTH), **random.attention()}
        block |= random.dense("", FFN) if architecture == "qwen35" else random.mixture()
        block |= random.entrance() | {"nextn.shared_head_norm": random.norm(WIDTH)}
        tensors |= named(number, block)
    return write_model(path, keys | dict(metadata or {}), tensors, weights)


def tiny_sparse(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 4,
    interval: int = 2,
    context: int = 512,
    vocab: int = 384,
    top_k: int = 24,
    weights: str = "F32",
    template: str | None = CHATML,
    metadata: Mapping[str, object] | None = None,
    further: int = 0,
) -> Path:
    """Write a GGUF of architecture ``qwen4exp`` with random weights: sparse attention beside gated delta nets, streams
    mixed by hyper-connections, embeddings of n-grams in layer 0. Equal arguments give equal bytes.

    :param top_k: positions that an indexer chooses; a multiple of its block of 4.
    :param interval: at least 2; other parameters as of :func:`tiny_hybrid`.
    """
    random, architecture = _Random(seed), "qwen4exp"
    offsets = np.cumsum([0, *NGRAM_SIZES]).astype(np.int64)
    own = {
        "hyper_connection.count": STREAMS,
        "hyper_connection.low_rank": RANK,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_DIM,
        "attention.indexer.top_k": top_k,
        "attention.indexer.block_size": INDEX_BLOCK,
        "attention.indexer.local_blocks": 0,
        "attention.compress_ratios": np.array(
            [0 if (n + 1) % interval else INDEX_BLOCK for n in range(layers)], np.int32
        ),
        "ple.layers": np.array([0], np.int32),
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": len(NGRAM_SIZES) // 2,
        "ple.conv_kernel": KERNEL,
        "ple.eos_token_id": 0,
        "ple.layer_multipliers": np.array([23703573157769, 20109073645365, 8052911324071], np.uint64),
        "ple.head_vocab_sizes": np.array(NGRAM_SIZES, np.uint64),
        "ple.head_offsets": offsets[:-1].astype(np.uint64),
        "embedding_length_per_layer_input": NGRAM_WIDTH,
    }
    keys = _keys(architecture, seed, layers, interval, context, vocab, template) | mixture_keys(architecture)
    keys |= {f"{architecture}.{name}": value for name, value in own.items()} | counted(architecture, layers, further)
    tensors: Arrays = {"token_embd.weight": random.matrix(vocab, WIDTH), "output.weight": random.matrix(vocab, WIDTH)}
    tensors["per_layer_token_embd.weight"] = random.matrix(int(offsets[-1]), NGRAM_WIDTH)
    tensors |= {f"output_{name}.weight": array for name, array in random.streams("hc", injects=False).items()}
    for number in range(layers):
        attends = (number + 1) % interval == 0
        block = random.attention() | random.indexer() if attends else random.delta_net(joint=False)
        block |= random.streams("hc_attn") | random.streams("hc_ffn") | random.mixture()
        if number == 0:
            block |= random.ngrams()
        tensors |= named(number, block)
    for number in range(layers, layers + further):
        block = random.attention() | random.indexer() | random.mixture() | random.entrance(STREAMS)
        block |= random.streams("hc_attn") | random.streams("hc_ffn") | random.streams("nextn.hc_head", injects=False)
        tensors |= named(number, block)
    return write_model(path, keys | dict(metadata or {}), tensors, weights)


def _keys(
    architecture: str, seed: int, layers: int, interval: int, context: int, vocab: int, template: str | None
) -> dict[str, object]:
    own = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": WIDTH,
        "vocab_size": vocab,
        "full_attention_interval": interval,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": ROTATED,
        "rope.freq_base": 10_000.0,
        "rope.dimension_sections": None if architecture == "qwen3next" else np.array([2, 1, 1, 0], np.int32),
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": KEY_DIM,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * VALUE_DIM,
    }
    return {
        "general.architecture": architecture,
        "general.name": f"tiny-{architecture}-{seed}",
        **{f"{architecture}.{name}": value for name, value in own.items()},
        **tokenizer_keys(vocab, template=template),
    }


def counted(architecture: str, layers: int, further: int) -> dict[str, object]:
    """The keys that count layers, where some predict further tokens."""
    if not further:
        return {}
    return {f"{architecture}.block_count": layers + further, f"{architecture}.nextn_predict_layers": further}


def mixture_keys(architecture: str) -> dict[str, object]:
    own = {
        "expert_count": EXPERTS,
        "expert_used_count": TOP,
        "expert_feed_forward_length": FFN,
        "expert_shared_feed_forward_length": FFN,
    }
    return {f"{architecture}.{name}": value for name, value in own.items()}


def named(number: int, block: Arrays) -> Arrays:
    """A layer's tensors under their whole names; a name that says what follows it (a dot) gets no ``.weight``."""
    whole = {"ssm_a": "ssm_a", "ssm_dt": "ssm_dt.bias"}
    return {f"blk.{number}.{whole.get(name, f'{name}.weight')}": array for name, array in block.items()}


def write_model(path: str | Path, keys: Mapping[str, object], tensors: Arrays, weights: str) -> Path:
    """Write matrices (and stacks of them) of at least 32 columns in the type given, all else as F32."""
    stored = {}
    for name, array in tensors.items():
        plain = array.ndim < 2 or "conv1d" in name or array.shape[-1] % 32 or name.endswith("gate_inp.weight")
        stored[name] = quantise(array, "F32" if plain else weights)
    return write_gguf(path, {key: value for key, value in keys.items() if value is not None}, stored)


class _Random:
    """Random parts of layers. Gains: what a layer adds outweighs what it is added to, so that every token of the
    context matters for the next one and a fault in positions, pages, states or masks changes the text."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)

    def matrix(self, *shape: int, gain: float = 2.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = self._random.standard_normal(shape, np.float32)
        numbers *= np.float32(gain / np.sqrt(shape[-1]))
        return numbers

    def norm(self, width: int) -> NDArray[np.float32]:
        return self.uniform(0.5, 1.5, width)

    def uniform(self, low: float, high: float, *shape: int) -> NDArray[np.float32]:
        return self._random.uniform(low, high, shape).astype(np.float32)

    def attention(self) -> Arrays:
        return {
            "attn_q": self.matrix(2 * HEADS * HEAD_DIM, WIDTH),
            "attn_k": self.matrix(KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v": self.matrix(KV_HEADS * HEAD_DIM, WIDTH),
            "attn_q_norm": self.norm(HEAD_DIM),
            "attn_k_norm": self.norm(HEAD_DIM),
            "attn_output": self.matrix(WIDTH, HEADS * HEAD_DIM),
        }

    def delta_net(self, *, joint: bool) -> Arrays:
        """:param joint: beta and alpha are one tensor."""
        inner = VALUE_HEADS * VALUE_DIM
        channels = 2 * KEY_HEADS * KEY_DIM + inner
        if joint:
            small = {"ssm_ba": self.matrix(2 * VALUE_HEADS, WIDTH)}
        else:
            small = {"ssm_beta": self.matrix(VALUE_HEADS, WIDTH), "ssm_alpha": self.matrix(VALUE_HEADS, WIDTH)}
        return {
            "attn_qkv": self.matrix(channels, WIDTH),
            "attn_gate": self.matrix(inner, WIDTH),
            **small,
            "ssm_conv1d": self.matrix(channels, KERNEL),
            "ssm_a": -self.uniform(0.02, 0.5, VALUE_HEADS),  # forgets in tens of tokens
            "ssm_dt": self.uniform(-1, 1, VALUE_HEADS),
            "ssm_norm": self.norm(VALUE_DIM),
            "ssm_out": self.matrix(WIDTH, inner),
        }

    def indexer(self) -> Arrays:
        return {
            "indexer.q_proj": self.matrix(INDEX_HEADS * INDEX_DIM, WIDTH),
            "indexer.k_proj": self.matrix(INDEX_DIM, WIDTH),
            "indexer.q_norm": self.norm(INDEX_DIM),
            "indexer.k_norm": self.norm(INDEX_DIM),
        }

    def streams(self, name: str, *, injects: bool = True) -> Arrays:
        whole = STREAMS * WIDTH
        block = {
            f"{name}_norm": self.norm(whole),
            f"{name}_down": self.matrix(RANK, whole, gain=4.0),
            f"{name}_up": self.matrix(whole, RANK),
        }
        return block | ({f"{name}_inject": self.matrix(STREAMS, whole, gain=4.0)} if injects else {})

    def ngrams(self) -> Arrays:
        whole, embedded = STREAMS * WIDTH, len(NGRAM_SIZES) * NGRAM_WIDTH
        return {
            "ple_key": self.matrix(whole, embedded),
            "ple_value": self.matrix(WIDTH, embedded),
            "ple_norm_key": self.norm(whole),
            "ple_norm_query": self.norm(whole),
            "ple_norm_conv": self.norm(whole),
            "ple_conv1d": self.matrix(whole, KERNEL),
        }

    def entrance(self, streams: int = 1) -> Arrays:
        """What makes the input of a layer that predicts further tokens."""
        return {
            "nextn.enorm": self.norm(WIDTH),
            "nextn.hnorm": self.norm(streams * WIDTH),
            "nextn.eh_proj": self.matrix(WIDTH, 2 * WIDTH),
        }

    def dense(self, suffix: str, ffn: int) -> Arrays:
        return {
            f"ffn_gate{suffix}": self.matrix(ffn, WIDTH),
            f"ffn_up{suffix}": self.matrix(ffn, WIDTH),
            f"ffn_down{suffix}": self.matrix(WIDTH, ffn),
        }

    def mixture(self) -> Arrays:
        return {
            "ffn_gate_inp": self.matrix(EXPERTS, WIDTH),
            "ffn_gate_exps": self.matrix(EXPERTS, FFN, WIDTH),
            "ffn_up_exps": self.matrix(EXPERTS, FFN, WIDTH),
            "ffn_down_exps": self.matrix(EXPERTS, WIDTH, FFN),
            "ffn_gate_inp_shexp": self.matrix(1, WIDTH),
            **self.dense("_shexp", FFN),
        }
