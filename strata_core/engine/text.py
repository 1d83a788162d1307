"""The text of a reply as it grows: detokenised, watched for stop texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strata_core.tokens.detokenizer import StreamingDetokenizer
from strata_core.tokens.events import held_back
from strata_core.tokens.tokenizer import Tokenizer


class ReplyText:
    """Turns generated tokens into text deltas.

    Text that may be the beginning of a stop text is held back until it is clear that it is not. When a stop text is
    complete, what stands before it is the end of the reply.

    :param visible: control tokens that are shown; others are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), visible: Collection[int] = ()):
        self._detokenizer = StreamingDetokenizer(tokenizer, continues=True, keep=visible)
        self._stop = tuple(stop)
        self._held = ""
        #: The stop text that ended the reply, if one did.
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Take in a token, return the text that can be shown now. After :attr:`stopped` is set, nothing more comes."""
        return self._release(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped is not None:
            return ""
        text = self._release(self._detokenizer.finish())
        rest, self._held = self._held, ""
        return text + rest if self.stopped is None else text

    def _release(self, delta: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + delta
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            place, self.stopped = min(places, key=lambda p: (p[0], -len(p[1])))
            self._held = ""
            return text[:place]
        hold = max((held_back(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
