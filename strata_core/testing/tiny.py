"""Tiny random models that are complete: weights, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_core.testing.gguf_build import TensorData, quantise, write_gguf

#: The ChatML template, with a generation prompt on demand.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: The control tokens; their ids are their positions, as in SmolLM2.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
#: Words whose letters are merged from left to right, to make a vocabulary that treats English unlike noise.
_WORDS = """
the of and to in is was for on that with as it are be this from at by or an have not which you one all can has
there time if will no do what so said more when up out them some like into him two make than first been its who
now people my made over did down only way find use may water long little very after words called just where most
know system user assistant hello world answer question please thank remember secret word colour number
"""


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for the bytes in GPT-2 style vocabularies, in order of byte.

    Printable Latin-1 characters stand for themselves; the others get the code points from 256 up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def tiny_vocabulary(size: int) -> tuple[list[str], NDArray[np.int32], list[str]]:
    """Tokens, their GGUF types and the merges of a byte-level BPE vocabulary of ``size`` (at least 259) tokens.

    Control tokens first, then the bytes, then one token per merge; what is left over is of type UNUSED.
    """
    tokens = [*CONTROL_TOKENS, *byte_alphabet()]
    if size < len(tokens):
        raise ValueError(f"a vocabulary needs at least {len(tokens)} tokens, not {size}")
    merges: list[str] = []
    for word in _WORDS.split():
        left = "Ġ"  # a space, in the byte alphabet
        for letter in word:
            if left + letter not in tokens and len(tokens) < size:
                merges.append(f"{left} {letter}")
                tokens.append(left + letter)
            left += letter
    used = len(tokens)
    tokens += [f"<|unused_{number}|>" for number in range(size - used)]
    types = np.full(size, _NORMAL, np.int32)
    types[: len(CONTROL_TOKENS)] = _CONTROL
    types[used:] = _UNUSED
    return tokens, types, merges


def tokenizer_keys(
    vocab: int,
    *,
    template: str | None = CHATML,
    pre: str = "smollm",
    add_bos: bool | None = False,
    bos: int | None = 0,
) -> dict[str, object]:
    """Metadata of the tokenizer of a tiny model; see :func:`tiny_llama`. Those that are None are to be left out."""
    tokens, types, merges = tiny_vocabulary(vocab)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": CONTROL_TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": template,
    }


def tiny_llama(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    context: int = 512,
    vocab: int = 384,
    tied: bool = True,
    weights: str = "F32",
    rope_base: float = 10_000.0,
    rope_scaling: Mapping[str, object] | None = None,
    rope_freqs: NDArray[np.float32] | None = None,
    template: str | None = CHATML,
    pre: str = "smollm",
    add_bos: bool | None = False,
    bos: int | None = 0,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write a GGUF of architecture ``llama`` with random weights; equal arguments give equal bytes.

    Heads are ``width / heads`` wide. As in all GGUF files of this architecture, the rows of ``attn_q`` and ``attn_k``
    are in the order of *interleaved* rotary embedding, which rotates elements 2i and 2i+1 of a head together. Models
    of ``transformers`` rotate i and i + half: row 2i + j of a head here is their row i + j * half (j = 0, 1).

    :param weights: type of the matrices: F32, F16, BF16, Q8_0, Q4_0 or Q4_1; block types need ``width`` and ``ffn`` to
        be multiples of 32. Norms (and ``rope_freqs``) are F32.
    :param tied: without ``output.weight``, the output uses the embedding.
    :param rope_scaling: entries below ``llama.rope.scaling.``, such as ``{"type": "linear", "factor": 4.0}``.
    :param rope_freqs: ``(width / heads / 2,)`` divisors of the rotary frequencies, stored as ``rope_freqs.weight``.
    :param template: None leaves the chat template out.
    :param add_bos: None leaves ``add_bos_token`` out.
    :param bos: the id of the beginning-of-sequence token; None leaves it out. The end-of-sequence token is
        ``<|im_end|>``.
    :param metadata: further entries; they replace what this function would write, and a None leaves that out.
    """
    keys: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": f"tiny-{seed}",
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width // heads,
        "llama.rope.freq_base": rope_base,
        "llama.vocab_size": vocab,
        **tokenizer_keys(vocab, template=template, pre=pre, add_bos=add_bos, bos=bos),
    }
    keys |= {f"llama.rope.scaling.{name}": value for name, value in (rope_scaling or {}).items()}
    keys |= metadata or {}
    tensors = _llama_tensors(np.random.default_rng(seed), layers, width, width // heads * kv_heads, ffn, vocab, tied)
    stored: dict[str, TensorData] = {
        name: quantise(array, weights if array.ndim == 2 else "F32") for name, array in tensors.items()
    }
    if rope_freqs is not None:
        stored["rope_freqs.weight"] = quantise(rope_freqs, "F32")
    return write_gguf(path, {key: value for key, value in keys.items() if value is not None}, stored)


def _llama_tensors(
    random: np.random.Generator, layers: int, width: int, kv_width: int, ffn: int, vocab: int, tied: bool
) -> dict[str, NDArray[np.float32]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = random.standard_normal((rows, columns), np.float32)
        numbers *= np.float32(gain / np.sqrt(columns))
        return numbers

    def norm() -> NDArray[np.float32]:
        return random.uniform(0.5, 1.5, width).astype(np.float32)

    # Gains: sharp attention and layers that outweigh the embedding, so that every token of the context matters for the
    # next one and a fault in positions, pages or masks changes the text.
    tensors = {"token_embd.weight": matrix(vocab, width, gain=2.0), "output_norm.weight": norm()}
    if not tied:
        tensors["output.weight"] = matrix(vocab, width, gain=2.0)
    for layer in range(layers):
        block = {
            "attn_norm": norm(),
            "attn_q": matrix(width, width, gain=2.0),
            "attn_k": matrix(kv_width, width, gain=2.0),
            "attn_v": matrix(kv_width, width, gain=2.0),
            "attn_output": matrix(width, width, gain=2.0),
            "ffn_norm": norm(),
            "ffn_gate": matrix(ffn, width, gain=2.0),
            "ffn_up": matrix(ffn, width, gain=2.0),
            "ffn_down": matrix(width, ffn, gain=2.0),
        }
        tensors |= {f"blk.{layer}.{name}.weight": array for name, array in block.items()}
    return tensors
