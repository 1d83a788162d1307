"""Keeps control tokens out of what a caller writes, across a template that may do anything with it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from strata_core.tokens.special import SpecialSplitter, check_unicode

#: Supplementary private use planes: characters without case, width or whitespace that no text needs.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTexts:
    """The texts of a tokenizer's control tokens, prepared for looking for them.

    :param texts: the texts, none of them empty.
    """

    def __init__(self, texts: Collection[str]):
        self._texts = list(texts)
        self._splitter = SpecialSplitter({text: n for n, text in enumerate(self._texts)})
        self._beginnings = {text[:n] for text in self._texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._texts for n in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)

    def pieces(self, text: str, *, edges: bool) -> list[tuple[str, bool]]:
        """The text in pieces, each with whether it could be taken for (a part of) a control token.

        :param edges: also part off what, at the text's end, begins a control token, and what, at its begin, ends one:
            with what a template puts beside it, it could make one.
        """
        found = [(p, False) if isinstance(p, str) else (self._texts[p], True) for p in self._splitter.split(text)]
        if edges and found and not found[-1][1]:
            last = found.pop()[0]
            cut = next((n for n in range(min(self._longest, len(last)), 0, -1) if last[-n:] in self._beginnings), 0)
            kept = last[: len(last) - cut]
            found += [(piece, taken) for piece, taken in ((kept, False), (last[len(kept) :], True)) if piece]
        if edges and found and not found[0][1]:
            first = found[0][0]
            cut = next((n for n in range(min(self._longest, len(first)), 0, -1) if first[:n] in self._ends), 0)
            found[:1] = [(piece, taken) for piece, taken in ((first[:cut], True), (first[cut:], False)) if piece]
        return found


class StandIns:
    """Private-use characters that stand for dangerous texts while one conversation is rendered.

    Each dangerous text gets characters of its own: chosen at random, and not among the characters of what the caller
    or the template wrote, so neither can name one.

    :param used: characters that occur in the template and in what the caller wrote.
    """

    def __init__(self, texts: ControlTexts, used: Collection[str]):
        self._texts = texts
        self._used = set(used)
        self._plain: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._json: dict[int, str] = {}

    def protect(self, value: Any, *, edges: bool = True) -> Any:
        """``value`` with stand-ins in all strings of its mappings and sequences, keys included.

        :raises InvalidRequest: a string has an unpaired surrogate.
        """
        if isinstance(value, str):
            check_unicode(value)
            pieces = self._texts.pieces(value, edges=edges)
            if not any(taken for _, taken in pieces):
                return value
            return "".join(self._stand_in(piece) if taken else piece for piece, taken in pieces)
        if isinstance(value, Mapping):
            # Names by which templates reach into messages are left alone, unless they hold a whole control text.
            return {
                self.protect(key, edges=not (isinstance(key, str) and key.isidentifier())): self.protect(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def escape_json(self, text: str) -> str:
        """JSON text in which the stand-ins of texts that JSON escapes stand for the escaped texts."""
        return text.translate(self._json)

    def restore(self, text: str) -> str:
        """The text with what the stand-ins stand for."""
        for stand_in, original in self._originals.items():
            text = text.replace(stand_in, original)
        return text

    def _stand_in(self, text: str) -> str:
        known = self._plain.get(text)
        if known is not None:
            return known
        stand_in = self._plain[text] = self._new(text)
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        if escaped != text:
            self._json[ord(stand_in)] = self._new(escaped)
        return stand_in

    def _new(self, original: str) -> str:
        while True:
            block = secrets.choice(_PRIVATE)
            character = chr(block.start + secrets.randbelow(len(block)))
            if character not in self._used:
                break
        self._used.add(character)
        self._originals[character] = original
        # What tojson(ensure_ascii=true) makes of it.
        self._originals[json.dumps(character)[1:-1]] = json.dumps(original)[1:-1]
        return character


def characters(value: Any) -> set[str]:
    """The characters above the basic plane in all strings of ``value``: those that a stand-in must not be."""
    if isinstance(value, str):
        return set() if value.isascii() else {letter for letter in value if letter > "\U0000ffff"}
    if isinstance(value, Mapping):
        return set().union(*(characters(key) | characters(item) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(characters, value))
    return set()
