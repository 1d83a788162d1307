"""What goes into the engine and what comes out: requests, their events, and the handle a caller holds.

These are values that cross threads. The engine thread puts events; one consumer (an HTTP thread, a library caller)
takes them. A request ends with exactly one :class:`Finished` or :class:`Failed`.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from strata_core.errors import InvalidRequest, StrataError


def _between(low: float, high: float) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_: object, field: attrs.Attribute[Any], value: float | None) -> None:
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if abs(value) < 1e300 else "a number far beyond"  # not every int is a float
            raise InvalidRequest(f"{field.name} must be between {low:g} and {high:g}, not {shown}", param=field.name)

    return check


@attrs.frozen
class Sampling:
    """How the next token is chosen. Defaults leave the model's distribution as it is.

    :ivar temperature: 0 = always the most likely token (ties: the lowest id).
    :ivar top_k: keep the k most likely tokens; 0 = all.
    :ivar top_p: keep the smallest set whose probability reaches p (Holtzman et al. 2020).
    :ivar min_p: drop tokens less likely than ``min_p`` times the most likely one (Nguyen et al. 2024).
    :ivar typical_p: keep the tokens of most typical information whose probability reaches p (Meister et al. 2023).
    :ivar repetition_penalty: divides positive, multiplies negative logits of tokens seen in the last
        ``penalty_window`` tokens (Keskar et al. 2019); 1 = none.
    :ivar presence_penalty: subtracted from the logit of every token generated before (OpenAI's definition).
    :ivar frequency_penalty: the same, times how often it was generated.
    :ivar penalty_window: tokens, prompt included, that the repetition penalty looks back on; 0 = all.
    :ivar logit_bias: token id -> value added to its logit.
    :ivar seed: start of the random stream; None = unpredictable.
    :ivar logprobs: how many most likely alternatives to report with each token; None = no log probabilities at all.
        They are those of the model, before temperature, penalties and filters.
    """

    temperature: float = attrs.field(default=1.0, validator=_between(0, 100))
    top_k: int = attrs.field(default=0, validator=_between(0, 2**31))
    top_p: float = attrs.field(default=1.0, validator=_between(0, 1))
    min_p: float = attrs.field(default=0.0, validator=_between(0, 1))
    typical_p: float = attrs.field(default=1.0, validator=_between(0, 1))
    repetition_penalty: float = attrs.field(default=1.0, validator=_between(0.01, 100))
    presence_penalty: float = attrs.field(default=0.0, validator=_between(-2, 2))
    frequency_penalty: float = attrs.field(default=0.0, validator=_between(-2, 2))
    penalty_window: int = attrs.field(default=64, validator=_between(0, 2**31))
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    seed: int | None = attrs.field(default=None, validator=_between(-(2**63), 2**64))
    logprobs: int | None = attrs.field(default=None, validator=_between(0, 20))


def new_request_id() -> str:
    return uuid.uuid4().hex


@attrs.frozen(eq=False)
class Request:
    """One sequence to continue.

    :ivar prompt: int32 token ids, at least one.
    :ivar max_tokens: most tokens to generate; None = until the context is full.
    :ivar stop: texts that end the reply; they are not part of it.
    :ivar cache: whether the conversation may be kept and earlier ones used (``strata_cache``).
    :ivar pin: while this is the newest request of its conversation, it is never evicted (``strata_pin``).
    :ivar prefix: leading tokens that other conversations share (``strata_prefix``); 0 where that is not said.
    :ivar tenant: reuse happens only among requests of the same tenant.
    :ivar after: id of a request whose prompt must have been read (or which must have ended) before this one starts:
        choices of one prompt share it this way instead of reading it twice.
    :ivar progress: whether :class:`Progress` events are wanted.
    :ivar visible: control tokens whose texts are part of the reply nevertheless: markers of tool calls and thinking.
    """

    prompt: np.ndarray
    sampling: Sampling = attrs.field(factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache: bool = True
    pin: bool = False
    prefix: int = 0
    tenant: str = ""
    after: str | None = None
    progress: bool = False
    visible: frozenset[int] = frozenset()
    id: str = attrs.field(factory=new_request_id)


@attrs.frozen
class Started:
    """The request has a slot, and it is known how much of the prompt need not be read.

    Comes once more, before any text, if what was resumed from proves unusable and the prompt is read from its start.

    :ivar cached_tokens: prompt tokens taken from what was computed before: exactly what is skipped.
    :ivar source: where they came from: ``live``, ``ram``, the name of a lower level, or None.
    """

    prompt_tokens: int
    cached_tokens: int
    source: str | None


@attrs.frozen
class Progress:
    """``processed`` of ``total`` prompt tokens are in the slot (cached ones included)."""

    processed: int
    total: int
    cached: int


@attrs.frozen
class TokenLogprob:
    """Natural-log probability of a token; ``text`` may be part of a character, ``raw`` never is."""

    token: int
    logprob: float
    text: str
    raw: bytes


@attrs.frozen
class TokenInfo:
    """A generated token with its log probability and the most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@attrs.frozen
class Delta:
    """More of the reply. Texts of all deltas concatenate to the reply; each is valid Unicode.

    ``text`` may be empty where tokens did not complete a character or may yet turn out to be a stop text.

    :ivar tokens: ids generated since the last delta; :ivar logprobs: their log probabilities, if asked for.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()


@attrs.frozen
class Finished:
    """The reply is complete.

    :ivar reason: ``stop`` (end token or stop text), ``length`` (max_tokens or context full).
    :ivar stop_text: the stop text that ended it, if one did.
    :ivar record: what the request did and where its time went.
    """

    reason: str
    stop_text: str | None
    record: RequestRecord


@attrs.frozen
class Failed:
    """The request ended without a complete reply; ``error`` is a :class:`Cancelled` after a cancellation."""

    error: StrataError
    record: RequestRecord | None = None


Event = Started | Progress | Delta | Finished | Failed


@attrs.frozen
class Reread:
    """Tokens that had been computed before and had to be read again, and why."""

    tokens: int
    reason: str


@attrs.frozen
class RequestRecord:
    """The ledger of one request. Times in seconds; a time that was not reached is None.

    :ivar reused: tokens by source (``live``, ``ram``, ...).
    :ivar reread: tokens read although they had been computed once, by reason.
    :ivar why: one phrase on the tokens that were read: ``new text``, ``diverged at position p``, ``never stored`` ...
    :ivar drafted_tokens: guessed ahead; :ivar accepted_tokens: of these, those that were right.
    :ivar drafts: both numbers by the kind of the guesses, of :data:`strata_core.engine.drafts.KINDS`.
    :ivar queued_s: from submission to a slot; :ivar read_s: reading the prompt; :ivar generate_s: first to last token.
    """

    id: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    generated_tokens: int
    reused: Mapping[str, int]
    reread: tuple[Reread, ...]
    created: float
    queued_s: float | None
    restore_s: float | None
    read_s: float | None
    generate_s: float | None
    slot: int | None
    why: str = ""
    tenant: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: Mapping[str, tuple[int, int]] = attrs.field(factory=dict)

    def line(self) -> str:
        """A request in one line: where its prompt came from, what was read and generated, how fast, and why."""
        sources = ", ".join(self.reused) or "none"
        line = f"prompt {self.prompt_tokens} = {self.cached_tokens} reused ({sources}) + {self.read_tokens} read"
        if self.read_s is not None:
            line += f" in {1e3 * self.read_s:.0f} ms ({_rate(self.read_tokens, self.read_s)})"
        line += f", {self.generated_tokens} generated"
        if self.generate_s is not None:
            # The first token comes with the prompt; the time from it to the last is that of all the others.
            line += f" in {1e3 * self.generate_s:.0f} ms ({_rate(self.generated_tokens - 1, self.generate_s)})"
        for kind, (drafted, accepted) in self.drafts.items():
            line += f", {accepted} of {drafted} guessed right ({kind})"
        if self.reread:
            parts = ", ".join(f"{reread.tokens} {reread.reason}" for reread in self.reread)
            line += f"; reread because {parts}"
        elif self.why:
            line += f"; {self.why}"
        return line if self.status in ("stop", "length") else f"{line}; {self.status}"

    @classmethod
    def unstarted(cls, handle: RequestHandle, status: str) -> RequestRecord:
        """The record of a request that ended before it had a slot."""
        return cls(
            id=handle.id,
            status=status,
            prompt_tokens=len(handle.request.prompt),
            cached_tokens=0,
            read_tokens=0,
            generated_tokens=0,
            reused={},
            reread=(),
            created=handle.created,
            queued_s=None,
            restore_s=None,
            read_s=None,
            generate_s=None,
            slot=None,
            why="never started",
            tenant=handle.request.tenant,
        )


@attrs.frozen
class Completion:
    """A whole reply, as :meth:`RequestHandle.result` returns it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenInfo, ...]
    reason: str
    stop_text: str | None
    started: Started
    record: RequestRecord


class RequestHandle:
    """A submitted request, seen from its caller. One thread consumes the events; any thread may cancel."""

    def __init__(self, request: Request, wake: Callable[[], None]):
        self.request = request
        self.id = request.id
        self.created = time.time()
        self.submitted = time.monotonic()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._wake = wake

    def cancel(self) -> None:
        """Ask the engine to stop. It ends with ``Failed(Cancelled)`` within one step, unless it has ended already."""
        self._cancelled.set()
        self._wake()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, event: Event) -> None:
        """Called by the engine thread."""
        self._events.put(event)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event, or None when none came within ``timeout`` seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def events(self) -> Iterator[Event]:
        """All events up to and including the last one."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def result(self) -> Completion:
        """Wait for the whole reply.

        :raises StrataError: the request failed or was cancelled.
        """
        texts: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenInfo] = []
        started: Started | None = None
        for event in self.events():
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Delta):
                texts.append(event.text)
                tokens.extend(event.tokens)
                logprobs.extend(event.logprobs)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                if started is None:
                    raise AssertionError("a request finished before it started")
                return Completion(
                    "".join(texts), tuple(tokens), tuple(logprobs), event.reason, event.stop_text, started, event.record
                )
        raise AssertionError("the events of a request ended without a last one")


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "- tok/s"
