"""Text to token ids and back, from the metadata of a model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from strata_core.errors import InvalidRequest
from strata_core.tokens.bpe import ByteLevelBPE
from strata_core.tokens.hf import JsonBPE
from strata_core.tokens.special import SpecialSplitter, check_unicode
from strata_core.tokens.spm import SentencePieceBPE
from strata_core.tokens.standins import ControlTexts
from strata_core.tokens.vocabulary import END_OF_TURN, HUGGINGFACE, TokenType, Vocabulary

_FINGERPRINT_VERSION = b"strata tokenizer 1"


class _Kind(Protocol):
    """What differs between byte-level BPE, SentencePiece and rules from a ``tokenizer.json``.

    ``finds_user_defined``: ``encode`` finds user-defined tokens by itself.
    """

    adds_bos: bool
    space_prefix: bool
    finds_user_defined: bool

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """The tokenizer of one model. Immutable and usable from several threads at once.

    The ids are those of llama.cpp on the same file (``bench/tokenizer_vs_llama_cpp.py`` compares), except that plain
    text is never turned into a control token, also not by merging, and that mixed-case rules (``gpt-4o``, ``tekken``)
    are the models' own instead of an approximation.

    :ivar vocab_size: number of ids.
    :ivar bos_id: begin token, :ivar eos_id: end token; None where the file names none (no default is assumed).
    :ivar end_ids: tokens that end a reply: eos, eot, eom, and control tokens that are known to end a turn.
    :ivar adds_bos: whether a prompt begins with ``bos_id``.
    :ivar space_prefix: whether encoding puts a space before a text, which decoding then takes away.
    """

    def __init__(self, vocabulary: Vocabulary):
        """
        :raises UnsupportedModel: unknown pre-tokeniser.
        :raises ModelFileError: the vocabulary cannot encode text.
        """
        self._vocabulary = vocabulary
        self._kind = _kind(vocabulary)
        user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
        self._control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        self._hidden = frozenset(self._control.values())
        matching = self._kind.matching if isinstance(self._kind, JsonBPE) else {}
        self._finder = SpecialSplitter({**user_defined, **self._control}, matching)
        self._plain_splitter = SpecialSplitter({} if self._kind.finds_user_defined else user_defined)
        self._splitter = SpecialSplitter(self._control, matching) if self._kind.finds_user_defined else self._finder
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.end_ids = _end_ids(vocabulary)
        wanted = self._kind.adds_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.adds_bos = wanted and self.bos_id is not None
        self.space_prefix = self._kind.space_prefix
        self._fingerprint = _fingerprint(vocabulary, self.adds_bos, self.space_prefix)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a model's metadata describe.

        :raises UnsupportedModel: a kind of tokenizer, or a pre-tokeniser, that is not known.
        :raises ModelFileError: missing or malformed metadata; names the key.
        """
        return cls(Vocabulary.from_metadata(metadata))

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> np.ndarray:
        """Token ids of a text: int32 (n,).

        :param parse_special: texts of control tokens become these tokens; otherwise they are plain text. User-defined
            tokens are whole either way.
        :param add_special: put the begin token before and the end token after, where the model wants them.
        :raises InvalidRequest: the text has an unpaired surrogate, which no encoding of Unicode can express.
        """
        check_unicode(text)
        ids = self._assemble((self._splitter if parse_special else self._plain_splitter).split(text))
        if add_special and self.adds_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self._vocabulary.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return np.array(ids, np.int32)

    def encode_prompt(self, text: str, *, parse_special: bool = True) -> np.ndarray:
        """Token ids of a prompt: int32 (n,), with exactly one begin token in front when the model wants one.

        A begin token that the text itself starts with is that one. Nothing is ever removed: a model may start with
        more than one special token.
        """
        return self.with_bos(self.encode(text, parse_special=parse_special))

    def with_bos(self, ids: np.ndarray) -> np.ndarray:
        """``ids``, after a begin token if the model wants one and they do not start with it."""
        if not self.adds_bos or (len(ids) and ids[0] == self.bos_id):
            return ids
        return np.concatenate([np.array([self.bos_id], np.int32), ids])

    def split_special(self, text: str) -> list[str | int]:
        """The text cut at its control tokens: their ids, and the (non-empty) strings between them.

        ``encode`` of each string, and the ids, in a row, are what ``encode(text, parse_special=True)`` gives.
        """
        pieces: list[str | int] = []
        for piece in self._splitter.split(text):
            if isinstance(piece, int) and piece in self._hidden:
                pieces.append(piece)
                continue
            part = piece if isinstance(piece, str) else self._vocabulary.tokens[piece]
            if pieces and isinstance(pieces[-1], str):
                pieces[-1] += part
            else:
                pieces.append(part)
        return pieces

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of token ids: what a :class:`~strata_core.tokens.StreamingDetokenizer` gives for them in pieces.

        Bytes that are no UTF-8 become U+FFFD; a character that is cut off at the end is one U+FFFD.

        :param skip_special: leave control and unknown tokens out; otherwise they are their text.
        :param continues: the ids continue an earlier text, so a space in front of them is a real one. Otherwise one
            leading space is taken away if encoding puts one there.
        :raises InvalidRequest: an id that is not in the vocabulary.
        """
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._hidden))
        if self.space_prefix and not continues and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of one token, possibly part of a character; for control tokens, those of their text.

        :raises InvalidRequest: no such id.
        """
        if not 0 <= token < self.vocab_size:
            raise InvalidRequest(f"token id {token} is not in the vocabulary (0 to {self.vocab_size - 1})")
        raw = self._bytes[token]
        if raw is None:
            raw = self._bytes[token] = self._kind.token_bytes(token)
        return raw

    def is_control(self, token: int) -> bool:
        """Whether plain text never becomes this token and ``decode`` skips it."""
        return token in self._hidden

    def id_of(self, text: str) -> int | None:
        """Id of the token that is stored with exactly this text (control and user-defined ones: as written)."""
        return self._vocabulary.ids.get(text)

    def encode_pieces(self, pieces: Sequence[str | int]) -> np.ndarray:
        """Token ids of plain texts and ids in a row, as :meth:`split_special` gives them: int32 (n,)."""
        ids: list[str | int] = []
        for piece in pieces:
            ids += self._plain_splitter.split(piece) if isinstance(piece, str) else [piece]
        return np.array(self._assemble(ids), np.int32)

    def special_ids(self, text: str) -> list[int]:
        """The control and user-defined tokens in a text, in their order."""
        return [piece for piece in self._finder.split(text) if isinstance(piece, int)]

    def _assemble(self, pieces: Sequence[str | int]) -> list[int]:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self._kind.encode(texts, begins=bool(pieces) and isinstance(pieces[0], str)))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids.extend(next(encoded))
            else:
                ids.append(piece)
        return ids

    @functools.cached_property
    def control(self) -> ControlTexts:
        """The texts that become a control token when they are parsed."""
        return ControlTexts(self._control.keys())

    def fingerprint(self) -> bytes:
        """16 bytes over everything that decides which ids a text gets."""
        return self._fingerprint


def _kind(vocabulary: Vocabulary) -> _Kind:
    if vocabulary.model == HUGGINGFACE:
        return JsonBPE(vocabulary)
    return ByteLevelBPE(vocabulary) if vocabulary.model == "gpt2" else SentencePieceBPE(vocabulary)


def _end_ids(vocabulary: Vocabulary) -> frozenset[int]:
    named = {i for i in (vocabulary.eos_id, vocabulary.eot_id, vocabulary.eom_id) if i is not None}
    named |= vocabulary.further_end_ids
    known = {text: vocabulary.ids[text] for text in END_OF_TURN if text in vocabulary.ids}
    if "<|return|>" in known and "<|call|>" in known and vocabulary.ids.get("<|end|>") not in named:
        known.pop("<|end|>", None)  # in this dialect it ends one message of several in a reply
    return frozenset(named | set(known.values()))


def _fingerprint(vocabulary: Vocabulary, adds_bos: bool, space_prefix: bool) -> bytes:
    digest = hashlib.blake2b(digest_size=16)

    def add(*fields: bytes) -> None:
        for field in fields:
            digest.update(len(field).to_bytes(8, "little") + field)

    flags = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id, adds_bos, vocabulary.add_eos, space_prefix)
    add(_FINGERPRINT_VERSION, vocabulary.model.encode(), vocabulary.pre.encode(), repr(flags).encode())
    for texts in (vocabulary.tokens, [half for pair in vocabulary.merges for half in pair]):
        joined = [text.encode() for text in texts]
        add(np.array([len(text) for text in joined], "<u4").tobytes(), b"".join(joined))
    add(bytes(vocabulary.types))
    add(b"" if vocabulary.scores is None else vocabulary.scores.astype("<f4").tobytes())
    if vocabulary.definition:
        add(vocabulary.definition.encode())
    return digest.digest()
