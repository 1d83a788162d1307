"""The dialogue of ``strata chat``: reads lines, prints replies as they come, says what was reused and the speeds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Console

from strata_core.cli.chat_transport import ChatError, Transport

HELP = "/reset begins a new conversation, /exit leaves, Ctrl+C stops a reply"


@attrs.define
class _Reply:
    """One reply as it comes. Times on the monotonic clock, in seconds."""

    begun: float = attrs.field(factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    text: str = ""
    usage: dict[str, Any] | None = None

    def token(self) -> None:
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last

    def summary(self) -> str:
        """What was read, what was reused and the speeds, as far as the server told."""
        if self.usage is None:
            return ""
        prompt, generated = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts = [f"prompt {prompt} = {cached} cached + {prompt - cached} read"]
        rate = ""
        if self.first is not None:  # None: the reply has no text
            parts.append(f"first token {self.first - self.begun:.2f} s")
            spent = self.last - self.first
            rate = f", {(generated - 1) / spent:.1f} tokens/s" if generated > 1 and spent > 0 else ""
        return " · ".join([*parts, f"{generated} tokens{rate}"])


class ChatSession:
    """One conversation at a time.

    :param system: system prompt that every conversation begins with, or None.
    :param fields: further fields of every request, such as sampling.
    """

    def __init__(self, transport: Transport, console: Console, system: str | None, fields: Mapping[str, Any]):
        self._fields = dict(fields)
        self._transport = transport
        self._console = console
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Until /exit or the end of input."""
        self._note(HELP)
        while True:
            try:
                line = self._console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self._start)
                self._note("a new conversation")
            elif line.startswith("/"):
                self._note(f"there is no command {line}: {HELP}")
            elif line:
                self.say(line)

    def say(self, text: str) -> None:
        """Send a turn and print the reply. One that failed is not part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        reply = _Reply()
        body = {"messages": self.messages, "stream": True, "stream_options": {"include_usage": True}, **self._fields}
        try:
            with self._transport.stream(body) as events:
                for event in events:
                    self._show(reply, event)
        except KeyboardInterrupt:
            self._console.print()
            self._note("stopped")
        except ChatError as error:
            self._console.print()
            self._console.print(error.message, style="red", markup=False, highlight=False)
            if not reply.text:
                self.messages.pop()
                return
        self.messages.append({"role": "assistant", "content": reply.text})
        self._console.print()
        self._note(reply.summary())

    def _show(self, reply: _Reply, event: dict[str, Any]) -> None:
        reply.usage = event.get("usage") or reply.usage
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            if thought or text:
                reply.token()
                reply.text += text
                style = "dim" if thought else ""
                self._console.print(thought + text, end="", style=style, markup=False, highlight=False, soft_wrap=True)

    def _note(self, text: str) -> None:
        if text:
            self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
