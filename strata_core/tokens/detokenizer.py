"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from strata_core.tokens.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns the tokens of one reply into text as they come.

    Every delta is valid Unicode, and all deltas in a row are what :meth:`Tokenizer.decode` gives for all the tokens.
    Bytes of an incomplete character are held back until it is complete or cannot become so; one that is cut off at the
    end is one U+FFFD, given by :meth:`finish`. Each token costs the length of its own bytes.

    :param skip_special: as in :meth:`Tokenizer.decode`.
    :param continues: as in :meth:`Tokenizer.decode`; a reply continues its prompt.
    :param keep: control tokens that are shown nevertheless, such as the markers of tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        *,
        continues: bool = False,
        keep: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._keep = frozenset(keep)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.space_prefix and not continues

    def push(self, token: int) -> str:
        """Text that this token completes; often empty.

        :raises InvalidRequest: no such id.
        """
        raw = self._tokenizer.token_bytes(token)
        if not raw or (self._skip_special and token not in self._keep and self._tokenizer.is_control(token)):
            return ""
        if self._drop_space:
            self._drop_space = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What is left: empty, or one U+FFFD for a character that was cut off."""
        return self._decoder.decode(b"", True)
