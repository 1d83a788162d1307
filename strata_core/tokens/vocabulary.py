"""What a model file says about its tokenizer, checked.

The keys are those of the GGUF specification (``tokenizer.ggml.*``). Nothing is built here; the result is plain data,
of which :mod:`~strata_core.tokens.bpe` and :mod:`~strata_core.tokens.spm` make something that encodes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel

PREFIX = "tokenizer.ggml."
#: Value of ``tokenizer.ggml.model`` where the rules are those of a ``tokenizer.json``, and the key that holds its text.
HUGGINGFACE = "huggingface"
DEFINITION = "tokenizer.huggingface.json"

#: Texts of tokens that end a turn. Such a token is control whatever type its file gives it (converters forget it; as a
#: user-defined token anybody could end a turn by writing the text into a message), as llama.cpp also has it.
END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
    }
)


class TokenType(enum.IntEnum):
    """Numbers of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@attrs.frozen(eq=False)
class Vocabulary:
    """The tokens of a model and how it wants them used.

    :ivar model: ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece BPE) or ``huggingface`` (a ``tokenizer.json``).
    :ivar pre: name of the pre-tokeniser; empty but for ``gpt2``.
    :ivar tokens: text of each token as stored: byte-level letters or ``▁`` for spaces in normal tokens.
    :ivar types: type of each token.
    :ivar scores: float32 (n,); None where the file has none.
    :ivar merges: pairs in the order of their rank; empty but for ``gpt2``.
    :ivar ids: id of each non-empty token text.
    :ivar add_bos: what the file says, or None.
    :ivar further_end_ids: tokens that end a reply beside those with a role.
    :ivar definition: text of the ``tokenizer.json``; empty but for ``huggingface``.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    scores: np.ndarray | None
    merges: tuple[tuple[str, str], ...]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unknown_id: int | None
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool | None
    further_end_ids: frozenset[int] = frozenset()
    definition: str = ""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read and check the ``tokenizer.ggml.*`` keys.

        :raises UnsupportedModel: ``tokenizer.ggml.model`` is of a kind that is not supported.
        :raises ModelFileError: a key is missing, of the wrong type or length, or names an absent token; ``param`` and
            the message name the key.
        """
        keys = _Keys(metadata)
        model = keys.text("model")
        if model not in ("gpt2", "llama", HUGGINGFACE):
            raise UnsupportedModel(
                f"{PREFIX}model is {model!r}; supported are 'gpt2' (byte-level BPE), 'llama' (SentencePiece) and "
                f"{HUGGINGFACE!r} (the tokenizer.json of a folder)",
                param=PREFIX + "model",
            )
        tokens = keys.texts("tokens")
        ids = _ids_by_text(tokens)
        return cls(
            model=model,
            pre=keys.text("pre", "") if model == "gpt2" else "",
            tokens=tokens,
            types=_types(keys, tokens),
            scores=keys.numbers("scores", len(tokens), required=model == "llama"),
            merges=_merges(keys, ids) if model == "gpt2" else (),
            ids=ids,
            bos_id=keys.token_id("bos_token_id", len(tokens)),
            eos_id=keys.token_id("eos_token_id", len(tokens)),
            eot_id=keys.token_id("eot_token_id", len(tokens)),
            eom_id=keys.token_id("eom_token_id", len(tokens)),
            unknown_id=keys.token_id("unknown_token_id", len(tokens)),
            add_bos=keys.flag("add_bos_token"),
            add_eos=keys.flag("add_eos_token") or False,
            add_space_prefix=keys.flag("add_space_prefix"),
            further_end_ids=keys.token_ids("eog_token_ids", len(tokens)),
            definition=keys.definition() if model == HUGGINGFACE else "",
        )

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Text -> id of the tokens of these types (those without text left out)."""
        wanted = frozenset(types)
        return {self.tokens[i]: i for i, kind in enumerate(self.types) if kind in wanted and self.tokens[i]}


class _Keys:
    """Typed access to the ``tokenizer.ggml.`` keys; every complaint names the key."""

    def __init__(self, metadata: Mapping[str, object]):
        self._metadata = metadata

    def _fail(self, name: str, why: str) -> ModelFileError:
        return ModelFileError(f"{PREFIX}{name} {why}", param=PREFIX + name)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(PREFIX + name, default)
        if value is None:
            raise self._fail(name, "is missing")
        if not isinstance(value, str):
            raise self._fail(name, f"is {value!r}, which is not a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._array(name)
        if value is None:
            raise self._fail(name, "is missing")
        if not value:
            raise self._fail(name, "is empty")
        texts = tuple(item for item in value if isinstance(item, str))
        if len(texts) != len(value):
            raise self._fail(name, "is not an array of strings")
        return texts

    def numbers(self, name: str, length: int, *, required: bool = False) -> np.ndarray | None:
        value = self._array(name)
        if value is None:
            if required:
                raise self._fail(name, "is missing")
            return None
        if len(value) != length:
            raise self._fail(name, f"has {len(value)} values for {length} tokens")
        try:
            numbers = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise self._fail(name, "is not an array of numbers") from error
        if numbers.ndim != 1 or np.isnan(numbers).any():
            raise self._fail(name, "is not an array of numbers")
        return numbers

    def flag(self, name: str) -> bool | None:
        value = self._metadata.get(PREFIX + name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise self._fail(name, f"is {value!r}, which is not a boolean")
        return None if value is None else bool(value)

    def token_id(self, name: str, count: int) -> int | None:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return None
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise self._fail(name, f"is {value!r}, which is not an integer")
        if not 0 <= value < count:
            raise self._fail(name, f"is {value}, but there are {count} tokens")
        return int(value)

    def token_ids(self, name: str, count: int) -> frozenset[int]:
        value = [] if self._metadata.get(PREFIX + name) is None else self._array(name)
        ids = frozenset(number for number in value or () if isinstance(number, int))
        if len(ids) != len(frozenset(value or ())) or not all(0 <= number < count for number in ids):
            raise self._fail(name, f"is not an array of ids of {count} tokens")
        return ids

    def definition(self) -> str:
        value = self._metadata.get(DEFINITION)
        if not isinstance(value, str):
            raise ModelFileError(f"{DEFINITION} is missing", param=DEFINITION)
        return value

    def _array(self, name: str) -> Sequence[object] | None:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return list(value.tolist()) if value.ndim == 1 else [value]
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self._fail(name, "is not an array")
        return value


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    ids = {text: i for i, text in enumerate(tokens) if text}
    if len(ids) + tokens.count("") != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if text and ids[text] != i)
        key = PREFIX + "tokens"
        raise ModelFileError(
            f"{key} has {twice!r} twice, as {tokens.index(twice)} and {ids[twice]}", param=key
        )
    return ids


def _types(keys: _Keys, tokens: Sequence[str]) -> tuple[TokenType, ...]:
    numbers = keys.numbers("token_type", len(tokens))
    if numbers is None:
        types = [TokenType.NORMAL] * len(tokens)
    else:
        by_number = {float(kind): kind for kind in TokenType}
        try:
            types = [by_number[number] for number in numbers.tolist()]
        except KeyError as error:
            key = PREFIX + "token_type"
            raise ModelFileError(f"{key} has an unknown type ({error})", param=key) from error
    return tuple(TokenType.CONTROL if text in END_OF_TURN else kind for text, kind in zip(tokens, types, strict=True))


def _merges(keys: _Keys, ids: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    merges = []
    for number, line in enumerate(keys.texts("merges")):
        # The first character belongs to the left part even when it is a space.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not right or left not in ids or right not in ids or left + right not in ids:
            key = PREFIX + "merges"
            raise ModelFileError(f"{key} number {number} is {line!r}, which names a token that is absent", param=key)
        merges.append((left, right))
    return tuple(merges)
