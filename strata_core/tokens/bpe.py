"""Byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, models

from strata_core.tokens.pretokenizers import pre_tokenizer
from strata_core.tokens.vocabulary import TokenType, Vocabulary


def _byte_letters() -> dict[int, str]:
    """Byte -> letter of GPT-2's vocabulary: printable Latin-1 is itself, the rest is U+0100 and up in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(0x100 + n) for n, byte in enumerate(others)}}


_BYTES = {letter: bytes([byte]) for byte, letter in _byte_letters().items()}


def letters_to_bytes(text: str) -> bytes:
    """The bytes that the letters of byte-level BPE stand for."""
    # A letter outside the alphabet means that the token was added as plain text.
    return b"".join(_BYTES.get(letter) or letter.encode() for letter in text)


class ByteLevelBPE:
    """Encodes text that has no special tokens in it.

    Control and unknown tokens are left out of the vocabulary that merging works on, and merges that touch them are
    dropped, so that plain text never becomes one, whatever the merges say. A byte that the model has no token for is
    left out, as llama.cpp and the models' own tokenizers do.

    :raises UnsupportedModel: unknown pre-tokeniser.
    """

    finds_user_defined = False

    def __init__(self, vocabulary: Vocabulary):
        rule = pre_tokenizer(vocabulary.pre)
        self.adds_bos = rule.adds_bos
        self.space_prefix = False
        self._vocabulary = vocabulary
        never = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        words = {text: i for text, i in vocabulary.ids.items() if text not in never}
        merges = list(vocabulary.merges)
        if never:
            merges = [(a, b) for a, b in merges if a in words and b in words and a + b in words]
        self._backend = Tokenizer(models.BPE(words, merges, ignore_merges=rule.ignore_merges))
        self._backend.pre_tokenizer = rule.build()

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Token ids of each text, the same wherever it stands."""
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_bytes(self, token: int) -> bytes:
        text = self._vocabulary.tokens[token]
        if self._vocabulary.types[token] not in (TokenType.NORMAL, TokenType.UNUSED):
            return text.encode()
        return letters_to_bytes(text)
