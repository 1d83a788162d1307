"""What a reply consists of, as it comes: text, reasoning and tool calls."""

from __future__ import annotations

import attrs


@attrs.frozen
class ContentDelta:
    """More of the reply's text."""

    text: str


@attrs.frozen
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@attrs.frozen
class ToolCallStart:
    """A tool call begins; ``index`` counts the calls of a reply from 0, ``id`` cannot be guessed."""

    index: int
    id: str
    name: str


@attrs.frozen
class ToolCallDelta:
    """More of the arguments of call ``index``; all of them in a row are one JSON text."""

    index: int
    arguments: str


@attrs.frozen
class ToolCallEnd:
    """Call ``index`` is complete.

    :ivar source: the exact text that the model wrote for it (and for others of the same block, where several share
        one), so that the call can be given back to the model as it was when a client returns it in other words.
    """

    index: int
    source: str


ReplyEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker`` without being all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
