"""Tiny random models of the families without recurrent layers; like all tiny models, complete and reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.tiny import CHATML, tokenizer_keys

Arrays = dict[str, NDArray[np.float32]]

#: Values of ``general.architecture`` that :func:`tiny_family` writes.
ARCHITECTURES = ("qwen2", "qwen3", "qwen3moe", "gemma3", "gpt-oss", "deepseek2")
#: Those whose models have layers that attend a window of :data:`WINDOW` positions.
WINDOWED = ("gemma3", "gpt-oss")
WINDOW = 12

#: Rows of matrices are multiples of 32, so that they can be quantised in blocks.
WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, TOP = 64, 4, 2, 16, 96, 8, 2
RANK, QUERY_RANK, ROTATED, PLAIN, VALUE_DIM = 32, 32, 8, 16, 16

_MIXTURES = ("qwen3moe", "gpt-oss", "deepseek2")


def tiny_family(
    path: str | Path,
    *,
    architecture: str,
    seed: int = 0,
    layers: int = 3,
    context: int = 512,
    vocab: int = 384,
    weights: str = "F32",
    template: str | None = CHATML,
    metadata: Mapping[str, object] | None = None,
    further: int = 0,
) -> Path:
    """Write a GGUF with random weights; equal arguments give equal bytes.

    :param architecture: one of :data:`ARCHITECTURES`.
    :param weights: type of the matrices, as in :func:`~strata_core.testing.gguf_build.quantise`; routers, norms and the
        matrices of single heads are F32.
    :param metadata: further entries; they replace what this function would write, and a None leaves that out.
    :param further: so many layers behind the others predict further tokens (``deepseek2``).
    """
    random = _Random(seed)
    tensors: Arrays = {
        "token_embd.weight": random.matrix(vocab, WIDTH),
        "output.weight": random.matrix(vocab, WIDTH),
        "output_norm.weight": random.norm(WIDTH),
    }
    for number in range(layers + further):
        block = _block(random, architecture, number) | (random.entrance() if number >= layers else {})
        tensors |= {f"blk.{number}.{name}{'' if name.endswith('.bias') else '.weight'}": a for name, a in block.items()}
    own = _keys(architecture) | {"block_count": layers + further, "context_length": context, "vocab_size": vocab}
    if further:
        own["nextn_predict_layers"] = further
    keys: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": f"tiny-{architecture}-{seed}",
        **{f"{architecture}.{name}": value for name, value in own.items()},
        **tokenizer_keys(vocab, template=template),
        **(metadata or {}),
    }
    stored = {name: quantise(array, _type(name, array, weights)) for name, array in tensors.items()}
    return write_gguf(path, {key: value for key, value in keys.items() if value is not None}, stored)


def _type(name: str, array: NDArray[np.float32], weights: str) -> str:
    small = ("_norm.weight", "_inp.weight", "_k_b.weight", "_v_b.weight", ".bias")
    return "F32" if array.ndim < 2 or name.endswith(small) else weights


def _keys(architecture: str) -> dict[str, object]:
    keys: dict[str, object] = {
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
    }
    if architecture in WINDOWED:
        keys |= {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2}
    if architecture == "gemma3":
        keys["final_logit_softcapping"] = 30.0
    if architecture in _MIXTURES:
        keys |= {"expert_count": EXPERTS, "expert_used_count": TOP, "expert_feed_forward_length": FFN}
    if architecture == "deepseek2":
        keys |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": QUERY_RANK,
            "attention.kv_lora_rank": RANK,
            "attention.key_length": RANK + ROTATED,
            "attention.value_length": RANK,
            "attention.key_length_mla": PLAIN + ROTATED,
            "attention.value_length_mla": VALUE_DIM,
            "rope.dimension_count": ROTATED,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        }
    return keys


def _block(random: _Random, architecture: str, number: int) -> Arrays:
    block: Arrays = {"attn_norm": random.norm(WIDTH)}
    block["post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"] = random.norm(WIDTH)
    if architecture == "gemma3":
        block |= {"post_attention_norm": random.norm(WIDTH), "post_ffw_norm": random.norm(WIDTH)}
    block |= random.latent() if architecture == "deepseek2" else random.attention()
    if architecture in ("qwen2", "gpt-oss"):
        block |= {f"attn_{name}.bias": random.bias(len(block[f"attn_{name}"])) for name in "qkv"}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        block |= {"attn_q_norm": random.norm(HEAD_DIM), "attn_k_norm": random.norm(HEAD_DIM)}
    if architecture == "gpt-oss":
        block |= {"attn_output.bias": random.bias(WIDTH), "attn_sinks": random.bias(HEADS)}
    if architecture not in _MIXTURES or (architecture == "deepseek2" and number == 0):
        return block | random.dense("")
    block |= random.mixture(biased=architecture == "gpt-oss")
    if architecture == "deepseek2":
        block |= random.dense("_shexp") | {"exp_probs_b.bias": np.abs(random.bias(EXPERTS))}
    return block


class _Random:
    """Random parts of layers. Gains: what a layer adds outweighs what it is added to, so that every token of the
    context matters for the next one and a fault in positions, pages or masks changes the text."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = self._random.standard_normal(shape, np.float32)
        numbers *= np.float32(2 / np.sqrt(shape[-1]))
        return numbers

    def norm(self, width: int) -> NDArray[np.float32]:
        return self._random.uniform(0.5, 1.5, width).astype(np.float32)

    def bias(self, *shape: int) -> NDArray[np.float32]:
        return self._random.normal(0, 0.5, shape).astype(np.float32)

    def attention(self) -> Arrays:
        return {
            "attn_q": self.matrix(HEADS * HEAD_DIM, WIDTH),
            "attn_k": self.matrix(KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v": self.matrix(KV_HEADS * HEAD_DIM, WIDTH),
            "attn_output": self.matrix(WIDTH, HEADS * HEAD_DIM),
        }

    def latent(self) -> Arrays:
        return {
            "attn_q_a": self.matrix(QUERY_RANK, WIDTH),
            "attn_q_a_norm": self.norm(QUERY_RANK),
            "attn_q_b": self.matrix(HEADS * (PLAIN + ROTATED), QUERY_RANK),
            "attn_kv_a_mqa": self.matrix(RANK + ROTATED, WIDTH),
            "attn_kv_a_norm": self.norm(RANK),
            "attn_k_b": self.matrix(HEADS, RANK, PLAIN),
            "attn_v_b": self.matrix(HEADS, VALUE_DIM, RANK),
            "attn_output": self.matrix(WIDTH, HEADS * VALUE_DIM),
        }

    def entrance(self) -> Arrays:
        """What makes the input of a layer that predicts further tokens, and its norm."""
        names = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
        return {name: self.norm(WIDTH) for name in names} | {"nextn.eh_proj": self.matrix(WIDTH, 2 * WIDTH)}

    def dense(self, suffix: str) -> Arrays:
        return {
            f"ffn_gate{suffix}": self.matrix(FFN, WIDTH),
            f"ffn_up{suffix}": self.matrix(FFN, WIDTH),
            f"ffn_down{suffix}": self.matrix(WIDTH, FFN),
        }

    def mixture(self, *, biased: bool) -> Arrays:
        block = {
            "ffn_gate_inp": self.matrix(EXPERTS, WIDTH),
            "ffn_gate_exps": self.matrix(EXPERTS, FFN, WIDTH),
            "ffn_up_exps": self.matrix(EXPERTS, FFN, WIDTH),
            "ffn_down_exps": self.matrix(EXPERTS, WIDTH, FFN),
        }
        if biased:
            block |= {
                "ffn_gate_inp.bias": self.bias(EXPERTS),
                "ffn_gate_exps.bias": self.bias(EXPERTS, FFN),
                "ffn_up_exps.bias": self.bias(EXPERTS, FFN),
                "ffn_down_exps.bias": self.bias(EXPERTS, WIDTH),
            }
        return block
