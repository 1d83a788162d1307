"""Chooses how a model's replies are read, from its chat template."""

from __future__ import annotations

import re
from collections.abc import Collection

from strata_core.tokens.events import ContentDelta, ReplyEvent
from strata_core.tokens.reasoning import ReasoningParser
from strata_core.tokens.tokenizer import Tokenizer
from strata_core.tokens.tools import HERMES, LLAMA3, MISTRAL, ToolCallParser, ToolSyntax, new_call_id, new_short_call_id

_THINK = ("<think>", "</think>")
_NINE_CHARACTERS = re.compile(r"length\s*!=\s*9\b")


class ReplyParser:
    """Turns the text of one reply, as it comes, into events.

    :param reasoning: what parts thinking from the answer, or None: everything is the answer.
    :param tools: what finds tool calls in the answer, or None: none are looked for.
    :param markers: the texts that these look for.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, markers: Collection[str]):
        self._reasoning, self._tools, self._markers = reasoning, tools, markers

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens whose texts the parser must see: what the detokenizer has to ``keep``."""
        ids = (tokenizer.id_of(marker) for marker in self._markers)
        return frozenset(i for i in ids if i is not None and tokenizer.is_control(i))

    def push(self, delta: str) -> list[ReplyEvent]:
        """Events that are certain now; a text that may yet turn out to be a marker is held back."""
        return self._answer(self._reasoning.push(delta) if self._reasoning else [ContentDelta(delta)] if delta else [])

    def finish(self) -> list[ReplyEvent]:
        """The rest, when the reply is over, however it ended."""
        events = self._answer(self._reasoning.finish() if self._reasoning else [])
        return events + (self._tools.finish() if self._tools else [])

    def _answer(self, parts: Collection[ReplyEvent]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for part in parts:
            events += self._tools.push(part.text) if self._tools and isinstance(part, ContentDelta) else [part]
        return events


def parser_for(
    template_source: str | None, *, prompt_text: str = "", tool_names: Collection[str] = (), reasoning: bool = True
) -> ReplyParser:
    """The parser for one reply.

    :param template_source: source of the chat template; None: everything is text.
    :param prompt_text: the rendered prompt; one that ends with ``<think>`` has begun the thinking already.
    :param tool_names: names of the tools that the request offers; without any, no calls are looked for.
    :param reasoning: whether thinking is parted from the answer where the template has it.
    """
    source = template_source or ""
    markers: list[str] = []
    thinking = tools = None
    if reasoning and any(marker in source for marker in _THINK):
        thinking = ReasoningParser(*_THINK, inside=prompt_text.rstrip().endswith(_THINK[0]))
        markers += _THINK
    syntax = _syntax(source) if tool_names else None
    if syntax:
        new_id = new_short_call_id if _NINE_CHARACTERS.search(source) else new_call_id
        tools = ToolCallParser(syntax, tool_names, new_id)
        markers += [marker for marker in (syntax.opening, syntax.closing) if marker]
        if syntax is MISTRAL:
            markers += ["[ARGS]", "[CALL_ID]"]
    return ReplyParser(thinking, tools, markers)


def _syntax(source: str) -> ToolSyntax | None:
    if HERMES.opening in source:
        return HERMES
    if MISTRAL.opening in source:
        return MISTRAL
    # Llama 3.2's template has no marker, but tells the model the form.
    if LLAMA3.opening in source or '{"name": function name, "parameters":' in source:
        return LLAMA3
    return None
