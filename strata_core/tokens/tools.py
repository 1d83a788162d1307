"""Reads tool calls from what a model writes."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection

import attrs

from strata_core.tokens.events import ContentDelta, ReplyEvent, ToolCallDelta, ToolCallEnd, ToolCallStart, held_back

# Models write line breaks into strings, which JSON wants escaped.
_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"[ \t\r\n]*")
_NAMED_CALL = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)")


@attrs.frozen
class ToolSyntax:
    """How a family of models writes tool calls.

    :ivar opening: marker before calls.
    :ivar closing: marker behind them; empty when calls go on to the end of the reply.
    :ivar bare: a reply that begins with ``{`` may be a call, without a marker.
    """

    opening: str
    closing: str = ""
    bare: bool = False


#: ``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen.
HERMES = ToolSyntax("<tool_call>", "</tool_call>")
#: ``{"name": …, "parameters": …}``, alone or behind the marker, several parted by ``;``: Llama 3.
LLAMA3 = ToolSyntax("<|python_tag|>", bare=True)
#: ``[TOOL_CALLS][{"name": …, "arguments": …}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``: Mistral.
MISTRAL = ToolSyntax("[TOOL_CALLS]")


@attrs.frozen
class Call:
    """A call as read. ``arguments`` is JSON, in the model's own writing where that is valid."""

    name: str
    arguments: str


def new_call_id() -> str:
    """``call_`` and 96 random bits."""
    return "call_" + secrets.token_hex(12)


def new_short_call_id() -> str:
    """Nine letters and digits, 53 random bits: Mistral's templates refuse every other form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolCallParser:
    """Finds tool calls in text that comes in pieces.

    A call is handed on when it is complete and valid. What looks like one but is not is handed on as text, markers
    included. White space around calls is dropped; in a reply without calls every character is text.

    :param syntax: how calls are written.
    :param names: names of the tools that were offered; a call without a marker must be of one of them.
    :param new_id: makes the id of a call.
    """

    def __init__(self, syntax: ToolSyntax, names: Collection[str], new_id: Callable[[], str] = new_call_id):
        self._syntax, self._names, self._new_id = syntax, frozenset(names), new_id
        self._calls = 0
        self._begun = False  # something else than white space was seen
        self._inside = False
        self._marked = False  # the block that is being read began with a marker
        self._held = ""  # outside: white space and what may be a marker; inside: all that the block has so far
        self._space = ""  # white space before the block
        self._behind = False  # nothing but white space came since the last call
        self._searched = 0

    def push(self, text: str) -> list[ReplyEvent]:
        """What is certain now."""
        self._held += text
        out: list[ReplyEvent] = []
        while self._inside_step(out) if self._inside else self._outside_step(out):
            pass
        return out

    def finish(self) -> list[ReplyEvent]:
        """The rest, when the reply is over. A block whose closing marker is missing counts when it is valid."""
        out: list[ReplyEvent] = []
        if self._inside:
            self._close(out, self._held, "")
        elif not self._behind:
            self._text(out, self._held)
        self._held = ""
        return out

    def _outside_step(self, out: list[ReplyEvent]) -> bool:
        if self._behind:
            self._held = self._held.lstrip()
        before, opened, rest = self._held.partition(self._syntax.opening)
        start = self._held.lstrip()
        if self._syntax.bare and not self._begun and start.startswith("{"):
            self._open(self._held[: len(self._held) - len(start)], start, marked=False)
            return True
        if opened:
            kept = before.rstrip()
            self._text(out, kept)
            self._open(before[len(kept) :], rest, marked=True)
            return True
        kept = before[: len(before) - held_back(before, self._syntax.opening)].rstrip()
        self._text(out, kept)
        self._held = before[len(kept) :]
        return False

    def _open(self, space: str, body: str, *, marked: bool) -> None:
        self._begun = self._inside = True
        self._marked = marked
        self._space, self._held, self._searched = space, body, 0

    def _inside_step(self, out: list[ReplyEvent]) -> bool:
        closing = self._syntax.closing
        at = self._held.find(closing, self._searched) if closing else -1
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(closing))
            return False
        body, rest = self._held[:at], self._held[at + len(closing) :]
        if _inside_string(body):
            self._searched = at + len(closing)  # the marker is part of an argument
            return True
        self._close(out, body, closing)
        self._held = rest
        return True

    def _close(self, out: list[ReplyEvent], body: str, closing: str) -> None:
        self._inside = False
        source = (self._syntax.opening if self._marked else "") + body + closing
        calls = read_calls(body, self._syntax.opening)
        if not calls or (not self._marked and any(call.name not in self._names for call in calls)):
            self._text(out, self._space + source)
            return
        for call in calls:
            out.append(ToolCallStart(self._calls, self._new_id(), call.name))
            out.append(ToolCallDelta(self._calls, call.arguments))
            out.append(ToolCallEnd(self._calls, source))
            self._calls += 1
        self._behind = True

    def _text(self, out: list[ReplyEvent], text: str) -> None:
        if text:
            self._begun, self._behind = True, False
            out.append(ContentDelta(text))


def read_calls(body: str, opening: str) -> list[Call] | None:
    """The calls in a block: one object, several (parted by ``;``, ``,`` or ``opening``), a list, or ``name{…}``.

    None when anything in the block is not a call.
    """
    text = body.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    calls: list[Call] = []
    position = 0
    try:
        while position < len(text):
            named = _NAMED_CALL.match(text, position)
            if named:
                _, end = _members(text, named.end())
                calls.append(Call(named[1], _json(text[named.end() : end])))
            else:
                position = _skip(text, position)
                members, end = _members(text, position)
                call = _call(members)
                if call is None:
                    return None
                calls.append(call)
            position = _skip(text, end)
            separator = next((mark for mark in (",", ";", opening) if text.startswith(mark, position)), "")
            position = _skip(text, position + len(separator))
    except (ValueError, RecursionError):
        return None
    return calls


def _call(members: dict[str, str]) -> Call | None:
    name = json.loads(members.get("name", "null"), strict=False)
    if not isinstance(name, str) or not name:
        return None
    arguments = members.get("arguments", members.get("parameters", "{}"))
    value = json.loads(arguments, strict=False)
    if isinstance(value, str):  # some write the arguments as a text that holds JSON
        arguments, value = value, json.loads(value, strict=False)
    return Call(name, _json(arguments)) if isinstance(value, dict) else None


def _json(text: str) -> str:
    """``text`` if it is strictly JSON, else the same value written so that it is."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(json.loads(text, strict=False), ensure_ascii=False)
    return text


def _members(text: str, position: int) -> tuple[dict[str, str], int]:
    """The members of the object at ``position``, values as they are written, and where the object ends.

    :raises ValueError: there is no object.
    """
    if text[position : position + 1] != "{":
        raise ValueError("no object")
    members: dict[str, str] = {}
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        key, end = _DECODER.raw_decode(text, position)
        position = _skip(text, end)
        if not isinstance(key, str) or text[position : position + 1] != ":":
            raise ValueError("no member")
        position = _skip(text, position + 1)
        _, end = _DECODER.raw_decode(text, position)
        members[key] = text[position:end]
        position = _skip(text, end)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "}":
            raise ValueError("no end of the object")
    return members, position + 1


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _inside_string(text: str) -> bool:
    """Whether JSON text stops within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
