"""An engine without a model: scripted replies through the real events, tokenizer and template.

What a request gets is decided by the text of its prompt, so that a client in another process can choose it: see
:func:`script_of`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import attrs
import numpy as np

from strata_core.engine.requests import (
    Delta,
    Failed,
    Finished,
    Progress,
    Request,
    RequestHandle,
    RequestRecord,
    Started,
    TokenInfo,
    TokenLogprob,
)
from strata_core.engine.stats import ConversationInfo, EngineStats, LevelInfo, SlotInfo
from strata_core.errors import BackendError, Cancelled, ContextLengthExceeded, NotFound, Overloaded
from strata_core.models.base import Geometry
from strata_core.tokens import Tokenizer
from strata_core.tokens.template import ChatTemplate

CHATML = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
For each call write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.content == 'refuse me' %}{{ raise_exception('refused by the template') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if thinking else '') }}{% endif %}"""


def byte_tokenizer() -> Tokenizer:
    """Byte-level, one token per byte, plus the control tokens of ChatML."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)]
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>", letters[1] + letters[2]]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1],
            "tokenizer.ggml.merges": [f"{letters[1]} {letters[2]}"],  # a file must have one
            "tokenizer.ggml.bos_token_id": 257,
            "tokenizer.ggml.eos_token_id": 258,
            "tokenizer.ggml.add_bos_token": False,
        }
    )


@attrs.frozen
class Script:
    """What a request gets: a reply of which each character is a delta after ``delay`` s; reading takes ``read`` s."""

    reply: str = "Hello there."
    delay: float = 0.0
    read: float = 0.0
    fail_after: int | None = None


def script_of(text: str) -> Script:
    """The last ``{"script": {...}}`` in a prompt, or the default."""
    start = text.rfind('{"script": ')
    return Script(**json.JSONDecoder().raw_decode(text, start)[0]["script"]) if start >= 0 else Script()


def scripted(**script: object) -> str:
    """A prompt text that asks for a script."""
    return json.dumps({"script": script})


class FakeEngine:
    name = "fake"
    aliases = ("other-name",)
    max_context = 4096
    geometry = Geometry(architecture="llama", layers=1, width=8, vocab=260, context=4096)

    def __init__(self, *, parallel: int = 2, queue: int = 4, template: str | None = CHATML):
        self.parallel, self._queue = parallel, queue
        self.facts = {"backend": "script"}
        self.tokenizer = byte_tokenizer()
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        self.template = None if template is None else ChatTemplate(template, **special)
        self._changed = threading.Condition()
        self.waiting: list[str] = []
        self.running: dict[str, RequestHandle] = {}
        self.records: dict[str, RequestRecord] = {}
        self.statuses: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.known: dict[str, list[np.ndarray]] = {}
        self.kept = {"c1": ConversationInfo("c1", "ram", 100, 4096, 1.0, 2.0, False, "")}
        self.draining = self.closed = False

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> RequestHandle:
        wanted = len(request.prompt) + (request.max_tokens or 1)
        if wanted > self.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens and {request.max_tokens or 1} are to be generated,"
                f" but the context holds {self.max_context}"
            )
        with self._changed:
            if self.draining:
                raise Overloaded("draining", retry_after=5)
            if len(self.waiting) >= self._queue and len(self.running) >= self.parallel:
                raise Overloaded(f"{len(self.waiting)} requests wait already", retry_after=3)
            self.waiting.append(request.id)
            self.requests.append(request)
        handle = RequestHandle(request, self._wake)
        threading.Thread(target=self._run, args=(handle,), daemon=True).start()
        return handle

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self, handle: RequestHandle) -> None:
        request = handle.request
        with self._changed:
            self._changed.wait_for(lambda: handle.cancelled or self._may_start(request))
            self.waiting.remove(request.id)
            if handle.cancelled:
                return self._end(handle, "cancelled", 0, 0)
            self.running[request.id] = handle
        try:
            self._reply(handle)
        finally:
            with self._changed:
                self.running.pop(request.id, None)
                self._changed.notify_all()
        return None

    def _may_start(self, request: Request) -> bool:
        first = self.waiting[0] == request.id and len(self.running) < self.parallel
        return first and (request.after is None or request.after not in self.waiting)

    def _reply(self, handle: RequestHandle) -> None:
        request = handle.request
        script = script_of(self.tokenizer.decode(request.prompt, skip_special=False))
        cached = self._cached(request)
        total = len(request.prompt)
        handle.put(Started(total, cached, "ram" if cached else None))
        done = cached
        while done < total:
            done = min(total, done + max(1, total // 32))
            time.sleep(script.read / 32)
            if handle.cancelled:
                return self._end(handle, "cancelled", cached, 0)
            if request.progress:
                handle.put(Progress(done, total, cached))
        generated = 0
        for index, letter in enumerate(script.reply):
            time.sleep(script.delay)
            if handle.cancelled:
                return self._end(handle, "cancelled", cached, generated)
            if index == script.fail_after:
                return self._end(handle, "backend_error", cached, generated)
            ids = tuple(letter.encode())
            if request.max_tokens is not None and generated + len(ids) > request.max_tokens:
                return self._end(handle, "length", cached, generated)
            generated += len(ids)
            handle.put(Delta(letter, ids, self._logprobs(request, letter, ids)))
        return self._end(handle, "stop", cached, generated)

    def _logprobs(self, request: Request, letter: str, ids: tuple[int, ...]) -> tuple[TokenInfo, ...]:
        if request.sampling.logprobs is None:
            return ()
        chosen = [TokenLogprob(token, -0.5, letter if len(ids) == 1 else "\ufffd", bytes([token])) for token in ids]
        others = tuple(TokenLogprob(97 + i, -1.0 - i, chr(97 + i), bytes([97 + i])) for i in range(20))
        return tuple(TokenInfo(item, others[: request.sampling.logprobs]) for item in chosen)

    def _cached(self, request: Request) -> int:
        known = self.known.setdefault(request.tenant, [])
        best = 0
        for prompt in known:
            same = min(len(prompt), len(request.prompt))
            differs = np.flatnonzero(prompt[:same] != request.prompt[:same])
            best = max(best, int(differs[0]) if len(differs) else same)
        known.append(request.prompt)
        return min(best, len(request.prompt) - 1) if request.cache else 0

    def _end(self, handle: RequestHandle, status: str, cached: int, generated: int) -> None:
        request, total = handle.request, len(handle.request.prompt)
        record = RequestRecord(
            id=request.id,
            status=status,
            prompt_tokens=total,
            cached_tokens=cached,
            read_tokens=total - cached,
            generated_tokens=generated,
            reused={"ram": cached} if cached else {},
            reread=(),
            created=handle.created,
            queued_s=0.0,
            restore_s=None,
            read_s=0.1,
            generate_s=0.2,
            slot=0,
            tenant=request.tenant,
        )
        with self._changed:  # before the last event, as clients ask for the record when they have it
            self.records[request.id] = record
            self.statuses[status] += 1
        if status == "cancelled":
            handle.put(Failed(Cancelled("cancelled"), record))
        elif status == "backend_error":
            handle.put(Failed(BackendError("the device went away"), record))
        else:
            handle.put(Finished(status, None, record))

    # -- state ------------------------------------------------------------------------------------------------

    def record(self, request_id: str) -> RequestRecord:
        if request_id not in self.records:
            raise NotFound(f"request {request_id!r} is not known (any more)", param="id")
        return self.records[request_id]

    def slots(self) -> list[SlotInfo]:
        ids = [*self.running, *[None] * self.parallel][: self.parallel]
        return [
            SlotInfo(i, "generating" if name else "idle", name, None, 0, None, None, self.max_context)
            for i, name in enumerate(ids)
        ]

    def conversations(self) -> list[ConversationInfo]:
        return list(self.kept.values())

    def announce(self, url: str) -> None:
        self.announced = url

    def pin_conversation(self, conversation_id: str, pinned: bool, tenant: str | None = None) -> None:
        self.kept[conversation_id] = attrs.evolve(self.kept[conversation_id], pinned=pinned)

    def delete_conversation(self, conversation_id: str, tenant: str | None = None) -> None:
        del self.kept[conversation_id]

    def levels(self) -> tuple[LevelInfo, ...]:
        return (LevelInfo("ram", 0, 4096, 1, 1 << 20, None),)

    def stats(self) -> EngineStats:
        records = list(self.records.values())
        given = {
            "requests_total": dict(self.statuses),
            "requests_cancelled": self.statuses["cancelled"],
            "queued": len(self.waiting),
            "running": len(self.running),
            "prompt_tokens_total": sum(r.prompt_tokens for r in records),
            "read_tokens_total": sum(r.read_tokens for r in records),
            "generated_tokens_total": sum(r.generated_tokens for r in records),
            "reused_tokens_total": {"ram": sum(r.cached_tokens for r in records)},
            "reread_tokens_total": {},
            "park_budget": None,
            "pool_pages_used": 25,
            "pool_pages_total": 100,
            "slots": tuple(self.slots()),
            "levels": self.levels(),
        }
        return EngineStats(**{field.name: given.get(field.name, 0) for field in attrs.fields(EngineStats)})

    # -- end --------------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> None:
        with self._changed:
            self.draining = True
            self._changed.wait_for(lambda: not self.running and not self.waiting, timeout)
            handles = list(self.running.values())
        for handle in handles:
            handle.cancel()

    def close(self) -> None:
        self.closed = True
