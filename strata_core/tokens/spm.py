"""SentencePiece BPE (``tokenizer.ggml.model`` = ``llama``): scores decide which neighbours merge first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, models

from strata_core.errors import ModelFileError
from strata_core.tokens.vocabulary import PREFIX, TokenType, Vocabulary

_SPACE = "▁"


class SentencePieceBPE:
    """Encodes text that has no special tokens in it.

    SentencePiece merges, again and again, the two neighbours whose union has the highest score. That is BPE with one
    merge for every way to cut a token into two tokens, ranked by the token's score, which is what is built here.
    Control, unknown and byte tokens are never made by merging. A character that has no token becomes its UTF-8 bytes
    (``<0x00>`` … ``<0xFF>``) or, in a vocabulary without all of them, the unknown token.

    :raises ModelFileError: a byte token has no ``<0xNN>`` text, or there is neither a byte nor an unknown token.
    """

    finds_user_defined = False

    def __init__(self, vocabulary: Vocabulary):
        self.adds_bos = True
        self.space_prefix = vocabulary.add_space_prefix is not False
        self._vocabulary = vocabulary
        self._bytes = _byte_tokens(vocabulary)
        unknown = vocabulary.unknown_id
        if unknown is None:
            unknown = next((i for i, kind in enumerate(vocabulary.types) if kind is TokenType.UNKNOWN), None)
        fallback = len(set(self._bytes.values())) == 256
        if not fallback and unknown is None:
            key = PREFIX + "tokens"
            raise ModelFileError(f"{key} has neither all 256 byte tokens nor an unknown token", param=key)
        mergeable = vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        words = dict(mergeable)
        if fallback:
            words.update(vocabulary.of_type(TokenType.BYTE))
        unknown_text = None if unknown is None else vocabulary.tokens[unknown]
        if unknown is not None and unknown_text is not None:
            words[unknown_text] = unknown
        self._backend = Tokenizer(
            models.BPE(
                words, _merges(vocabulary, mergeable), unk_token=unknown_text, fuse_unk=True, byte_fallback=fallback
            )
        )

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Token ids of each text; each is taken as the begin of a text or what follows a special token."""
        prefix = _SPACE if self.space_prefix else ""
        escaped = [prefix + text.replace(" ", _SPACE) for text in texts]
        return [found.ids for found in self._backend.encode_batch_fast(escaped, add_special_tokens=False)]

    def token_bytes(self, token: int) -> bytes:
        text, kind = self._vocabulary.tokens[token], self._vocabulary.types[token]
        if kind is TokenType.BYTE:
            return bytes([self._bytes[token]])
        if kind in (TokenType.NORMAL, TokenType.UNUSED):
            return text.replace(_SPACE, " ").encode()
        return text.encode()


def _byte_tokens(vocabulary: Vocabulary) -> dict[int, int]:
    """Id -> byte value of the byte tokens."""
    values = {}
    for text, token in vocabulary.of_type(TokenType.BYTE).items():
        try:
            if len(text) != 6 or not (text.startswith("<0x") and text.endswith(">")):
                raise ValueError(text)
            values[token] = int(text[3:5], 16)
        except ValueError as error:
            key = PREFIX + "tokens"
            raise ModelFileError(f"{key} {token} is a byte token, but its text is {text!r}", param=key) from error
    return values


def _merges(vocabulary: Vocabulary, mergeable: dict[str, int]) -> list[tuple[str, str]]:
    """Every (left, right) whose union is a token, best score first; of one token, the longest left part first."""
    scores = vocabulary.scores
    assert scores is not None  # required of this kind when the metadata were read
    ids = np.fromiter(mergeable.values(), np.int64, len(mergeable))
    texts = list(mergeable)
    merges = []
    for place in np.argsort(-scores[ids], kind="stable").tolist():
        text = texts[place]
        for cut in range(len(text) - 1, 0, -1):
            if text[:cut] in mergeable and text[cut:] in mergeable:
                merges.append((text[:cut], text[cut:]))
    return merges
