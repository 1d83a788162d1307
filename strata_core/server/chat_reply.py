"""Chat replies: what the engine generates, as ``chat.completion`` objects and chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from strata_core.engine.requests import Delta, Finished, Progress, TokenInfo
from strata_core.server import replies
from strata_core.server.fields import Options
from strata_core.server.running import ChoiceEvent, Running
from strata_core.tokens import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ReplyParser,
    ToolCallDelta,
    ToolCallStart,
)


@attrs.define
class _Choice:
    """One choice so far.

    :ivar unsent: log probabilities of tokens whose text is still held back by the parser.
    :ivar one_call: show the first tool call only, as the client asked for no parallel ones.
    """

    parser: ReplyParser
    one_call: bool
    opened: bool = False
    content: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    calls: list[dict[str, Any]] = attrs.field(factory=list)
    logprobs: list[TokenInfo] = attrs.field(factory=list)
    unsent: list[TokenInfo] = attrs.field(factory=list)
    reason: str | None = None

    def deltas(self, events: Iterable[ReplyEvent]) -> Iterator[dict[str, Any]]:
        """Take in what the parser found; yields OpenAI's ``delta`` objects."""
        for event in events:
            if isinstance(event, ContentDelta):
                self.content.append(event.text)
                yield {"content": event.text}
            elif isinstance(event, ReasoningDelta):
                self.reasoning.append(event.text)
                yield {"reasoning_content": event.text}
            elif isinstance(event, ToolCallStart) and not self._hidden(event.index):
                self.calls.append(_call(event))
                # Another object than the one that is kept: that one's arguments grow.
                yield {"tool_calls": [{"index": event.index, **_call(event)}]}
            elif isinstance(event, ToolCallDelta) and not self._hidden(event.index):
                self.calls[event.index]["function"]["arguments"] += event.arguments
                yield {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}

    def _hidden(self, index: int) -> bool:
        return self.one_call and index > 0

    def finish_reason(self, reason: str) -> str:
        """A reply that ended by itself after a call waits for the call's result."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        found: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        if self.reasoning:
            found["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            found["tool_calls"] = self.calls
        return found


def _call(event: ToolCallStart) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}


class ChatReply:
    """Chunks and whole replies of a chat request; see :class:`strata_core.server.generation.Dialect`.

    :param parsers: one per choice.
    """

    def __init__(
        self, model: str, running: Running, options: Options, parsers: Sequence[ReplyParser], *, one_call: bool
    ):
        self._running = running
        self._options = options
        self._choices = [_Choice(parser, one_call) for parser in parsers]
        self._frame = {
            "id": f"chatcmpl-{running.ids[0]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": replies.FINGERPRINT,
        }

    def chunks(self, item: ChoiceEvent) -> Iterator[dict[str, Any]]:
        choice, event = self._choices[item.index], item.event
        if not choice.opened:
            choice.opened = True
            yield self._chunk(item.index, {"role": "assistant", "content": ""})
        if isinstance(event, Progress):
            yield self._chunk(item.index, {}) | {"prompt_progress": attrs.asdict(event)}
        elif isinstance(event, Delta):
            choice.logprobs.extend(event.logprobs)
            choice.unsent.extend(event.logprobs)
            for delta in choice.deltas(choice.parser.push(event.text)):
                yield self._chunk(item.index, delta, self._take_logprobs(choice))
        elif isinstance(event, Finished):
            for delta in choice.deltas(choice.parser.finish()):
                yield self._chunk(item.index, delta, self._take_logprobs(choice))
            choice.reason = choice.finish_reason(event.reason)
            yield self._chunk(item.index, {}, self._take_logprobs(choice), choice.reason)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        extra = replies.extras(self._running, self._options, in_stream=True)
        if extra:
            yield self._chunk_frame() | {"choices": []} | extra

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": replies.chat_logprobs(choice.logprobs) if self._wants_logprobs else None,
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._frame | {"choices": choices} | replies.extras(self._running, self._options, in_stream=False)

    @property
    def _wants_logprobs(self) -> bool:
        return self._options.sampling.logprobs is not None

    def _take_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        infos, choice.unsent = choice.unsent, []
        return replies.chat_logprobs(infos) if infos else None

    def _chunk_frame(self) -> dict[str, Any]:
        return self._frame | {"object": "chat.completion.chunk"}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk_frame() | {"choices": [choice]}
