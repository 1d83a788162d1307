"""Parts a model's thinking from its answer."""

from __future__ import annotations

from strata_core.tokens.events import ContentDelta, ReasoningDelta, held_back


class ReasoningParser:
    """Reads ``<think>…</think>`` at the begin of a reply from text that comes in pieces.

    Line breaks just inside and just behind the markers belong to the markers: templates write them themselves when the
    parts are given back. Everything else is handed on, in order, as soon as it cannot be part of a marker. Reasoning
    that is never closed is reasoning.

    :param opening: marker that begins it; :param closing: marker that ends it.
    :param inside: the prompt ended with the opening marker, so the reply begins inside.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool):
        self._opening, self._closing = opening, closing
        self._state = "reasoning" if inside else "begin"
        self._fresh = True  # nothing of this part was handed on yet, so line breaks are the marker's
        self._held = ""

    def push(self, text: str) -> list[ContentDelta | ReasoningDelta]:
        """What is certain now."""
        self._held += text
        out: list[ContentDelta | ReasoningDelta] = []
        if self._state == "begin":
            self._begin()
        if self._state == "reasoning":
            self._reason(out)
        if self._state == "answer":
            self._answer(out)
        return out

    def finish(self) -> list[ContentDelta | ReasoningDelta]:
        """The rest, when the reply is over."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        return [ReasoningDelta(rest) if self._state == "reasoning" else ContentDelta(rest)]

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._opening):
            self._state, self._held = "reasoning", start[len(self._opening) :]
        elif not self._opening.startswith(start):
            self._state, self._fresh = "answer", False

    def _reason(self, out: list[ContentDelta | ReasoningDelta]) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\r\n")
        thought, closed, rest = self._held.partition(self._closing)
        if closed:
            self._state, self._held = "answer", rest
            thought = thought.rstrip("\r\n")
        else:
            certain = self._held[: len(self._held) - held_back(self._held, self._closing)]
            thought = certain.rstrip("\r\n")
            self._held = self._held[len(thought) :]
        if thought:
            self._fresh = False
            out.append(ReasoningDelta(thought))
        if closed:
            self._fresh = True

    def _answer(self, out: list[ContentDelta | ReasoningDelta]) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\r\n")
        if self._held:
            self._fresh = False
            out.append(ContentDelta(self._held))
            self._held = ""
