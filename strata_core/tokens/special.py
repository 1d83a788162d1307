"""Cuts a text at the tokens that are never made by merging: control and user-defined ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenizers import AddedToken, Tokenizer, models

from strata_core.errors import InvalidRequest

#: Stands for "text between tokens" in the matcher's own vocabulary; never compared with a text.
_OUTSIDE = "\0outside"


class SpecialSplitter:
    """Finds given texts in a text, leftmost first, of several at one place the longest.

    The matching is the added-token matcher of ``tokenizers`` (an automaton, one pass whatever the number of texts).

    :param ids: text -> id, no empty text.
    :param matching: of texts that do not match just anywhere: whether space before (``lstrip``) or after (``rstrip``)
        belongs to the match, and whether it is only found between words (``single_word``).
    """

    def __init__(self, ids: Mapping[str, int], matching: Mapping[str, Mapping[str, bool]] = MappingProxyType({})):
        self._matcher: Tokenizer | None = None
        if not ids:
            return
        self._outside = max(ids.values()) + 1
        self._matcher = Tokenizer(models.WordLevel({**ids, _OUTSIDE: self._outside}, unk_token=_OUTSIDE))
        self._matcher.add_special_tokens(
            [AddedToken(text, normalized=False, special=True, **matching.get(text, {})) for text in ids]
        )

    def split(self, text: str) -> list[str | int]:
        """The text in pieces: strings for what lies between, ids for what was found; no empty strings."""
        if not text:
            return []
        if self._matcher is None:
            return [text]
        found = self._matcher.encode(text, add_special_tokens=False)
        if len(found.ids) == 1 and found.ids[0] == self._outside:
            return [text]
        return [
            text[start:end] if token == self._outside else token
            for token, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]


def check_unicode(text: str) -> None:
    """:raises InvalidRequest: the text has an unpaired surrogate (``"\\ud83d"`` alone in JSON makes one)."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has an unpaired surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
        ) from error
