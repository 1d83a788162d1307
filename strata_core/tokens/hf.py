"""Encoding by the rules of a ``tokenizer.json`` (``tokenizer.ggml.model`` = ``huggingface``)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.tokens.bpe import letters_to_bytes
from strata_core.tokens.vocabulary import DEFINITION, TokenType, Vocabulary

_SPACE = "▁"


class JsonBPE:
    """Encodes text that has no control tokens in it, with the file's own normaliser, pre-tokeniser and merges.

    As in :class:`~strata_core.tokens.bpe.ByteLevelBPE`, control tokens and merges that touch them are left out, so that
    plain text never becomes one. User-defined tokens stay: the file says how they match.

    :raises ModelFileError: the file is malformed.
    :raises UnsupportedModel: the library knows no such rules.
    """

    finds_user_defined = True

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        try:
            self._read(json.loads(vocabulary.definition))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ModelFileError):
                raise
            raise ModelFileError(f"tokenizer.json is malformed: {error!r:.200}", param=DEFINITION) from error

    def _read(self, rules: dict[str, Any]) -> None:
        self.adds_bos = False
        nodes = [node for part in ("normalizer", "pre_tokenizer", "decoder") for node in _nodes(rules.get(part))]
        self._byte_level = any(node.get("type") == "ByteLevel" for node in nodes)
        self.space_prefix = any(_strips_space(node) for node in _nodes(rules.get("decoder")))
        self.matching = _matching(rules)
        _leave_out(rules, self._vocabulary)
        self._first = _build(rules)
        # A space that is only put before the begin of a text must not come again after a control token within it.
        differs = any(_puts_first_space(node) for node in nodes)
        self._later = _build(_without_first_space(rules)) if differs else self._first

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Token ids of each text.

        :param begins: whether the first text is the begin of the whole.
        """
        first = 1 if begins else 0
        parts = (self._first, texts[:first]), (self._later, texts[first:])
        return [
            found.ids
            for backend, part in parts
            for found in backend.encode_batch_fast(list(part), add_special_tokens=False)
        ]

    def token_bytes(self, token: int) -> bytes:
        text, kind = self._vocabulary.tokens[token], self._vocabulary.types[token]
        if kind is TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind is not TokenType.NORMAL:
            return text.encode()
        return letters_to_bytes(text) if self._byte_level else text.replace(_SPACE, " ").encode()


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """A rule and those within it."""
    if isinstance(value, dict):
        yield value
        for key in ("normalizers", "pretokenizers", "decoders"):
            for inner in value.get(key) or ():
                yield from _nodes(inner)


def _strips_space(node: Mapping[str, Any]) -> bool:
    if node.get("type") == "Metaspace":
        return bool(node.get("prepend_scheme", "always") != "never")
    return bool(node.get("type") == "Strip" and node.get("content") == " " and node.get("start", 0) > 0)


def _puts_first_space(node: Mapping[str, Any]) -> bool:
    return node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"


def _without_first_space(rules: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(rules))
    for node in _nodes(changed.get("pre_tokenizer")):
        if _puts_first_space(node):
            node["prepend_scheme"] = "never"
    return changed


def _matching(rules: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """How added tokens match, where it is not just anywhere in the text."""
    flags = ("lstrip", "rstrip", "single_word")
    entries = [entry for entry in rules.get("added_tokens", ()) if any(entry.get(flag) for flag in flags)]
    return {entry["content"]: {flag: bool(entry.get(flag)) for flag in flags} for entry in entries}


def _leave_out(rules: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Take control tokens, what is added around a text, and what cuts it short out of the rules."""
    never = set(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    model = rules["model"]
    gone = never - {model.get("unk_token")}
    if gone:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges", ()))
        model["merges"] = [merge for merge, (a, b) in pairs if not gone & {a, b, a + b}]
    model["vocab"] = {text: number for text, number in model["vocab"].items() if text not in gone}
    known = vocabulary.ids
    rules["added_tokens"] = [
        entry
        for entry in rules.get("added_tokens", ())
        if entry["content"] not in never and known.get(entry["content"]) == entry["id"]
    ]
    # The library numbers added tokens anew unless it finds them in the vocabulary; no merge makes them there.
    model["vocab"].update((entry["content"], entry["id"]) for entry in rules["added_tokens"])
    rules.update(post_processor=None, truncation=None, padding=None)


def _build(rules: Mapping[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(rules))
    except (KeyboardInterrupt, MemoryError, SystemExit):
        raise
    except BaseException as error:  # the library has no class of its own for this, and its panics are no Exception
        raise UnsupportedModel(f"tokenizer.json cannot be used: {error}", param=DEFINITION) from error
