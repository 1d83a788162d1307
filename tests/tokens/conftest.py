"""A tokenizer without a model file: every byte is a token, and a few words are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from tokenizers import pre_tokenizers

from strata_core.tokens import Tokenizer
from strata_core.weights.gguf import GGUFFile

SPECIAL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4, "<tool_call>": 4}
WORDS = {"h e": "he", "l l": "ll", "he ll": "hell", "hell o": "hello", "Ġ hello": "Ġhello", "Ċ Ċ": "ĊĊ"}

Metadata = dict[str, object]


def byte_level(pre: str = "qwen2", special: Mapping[str, int] = SPECIAL, **keys: object) -> Metadata:
    """Metadata of a byte-level BPE tokenizer; ``keys`` replace or (None) remove ``tokenizer.ggml.`` keys."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *WORDS.values(), *special]
    types = [1] * (len(letters) + len(WORDS)) + list(special.values())
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(WORDS), **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentence_piece(**keys: object) -> Metadata:
    """Metadata of a SentencePiece tokenizer with byte fallback."""
    first = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    pieces = ["▁he", "llo", "▁hello", "▁▁", "he", "ll", "<s", *"▁helo<s>"]
    tokens = [*first, *pieces, "<user>"]
    scores = [0.0] * len(first) + [-float(n) for n in range(len(pieces))] + [0.0]
    types = [*first.values(), *[1] * len(pieces), 4]
    values = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    values |= {"bos_token_id": 1, "eos_token_id": 2, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.fixture
def byte_level_metadata() -> Callable[..., Metadata]:
    return byte_level


@pytest.fixture
def sentence_piece_metadata() -> Callable[..., Metadata]:
    return sentence_piece


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(byte_level())


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return Tokenizer.from_metadata(sentence_piece())


@pytest.fixture(scope="session")
def smollm_metadata(default_model_path) -> Mapping[str, object]:
    return GGUFFile.open(default_model_path).metadata


@pytest.fixture(scope="session")
def smollm(smollm_metadata) -> Tokenizer:
    return Tokenizer.from_metadata(smollm_metadata)
