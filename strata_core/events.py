"""What plugins may observe, and the dispatcher that tells them.

Events are immutable values about something that has happened. The engine emits a handful per request, never one per
token, page or layer; delivery runs on a thread of its own so that an observer cannot slow the engine down.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

import attrs

log = logging.getLogger("strata.events")


@attrs.frozen(kw_only=True)
class ServerReady:
    """The server accepts requests. ``url`` is where it listens, ``backend`` and ``model`` are names as listed."""

    url: str
    model: str
    backend: str


@attrs.frozen(kw_only=True)
class RequestFinished:
    """A request left the engine, whatever way it ended.

    ``cached_tokens`` were reused (from ``source``: live, ram, warm, cold, shared or none), ``prompt_tokens`` is the
    full prompt. Times are seconds: waiting in the queue, reading the prompt, generating. ``error`` is the ``code`` of
    the error that ended it, or None.
    """

    request_id: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    source: str
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    error: str | None = None


@attrs.frozen(kw_only=True)
class ConversationParked:
    """A conversation left its slot and was kept: ``target`` is the level that has it now. ``nbytes`` as accounted."""

    conversation: str
    tokens: int
    nbytes: int
    target: str
    seconds: float


@attrs.frozen(kw_only=True)
class ConversationRestored:
    """``tokens`` of a conversation were resumed from ``level`` at ``rung`` (end, state, page or text)."""

    conversation: str
    tokens: int
    level: str
    rung: str
    seconds: float


@attrs.frozen(kw_only=True)
class ConversationEvicted:
    """A conversation left ``level``.

    ``moved_to`` is the level below that adopted it, or None when nothing has it any more; ``reason`` is the word of
    the why-ledger (budget, age, superseded, admission ...).
    """

    conversation: str
    tokens: int
    nbytes: int
    level: str
    reason: str
    moved_to: str | None = None


@attrs.frozen(kw_only=True)
class LevelWarning:
    """A level, plugin or backend failed softly: what was asked of it was done another way."""

    level: str
    message: str


Event: TypeAlias = (
    ServerReady | RequestFinished | ConversationParked | ConversationRestored | ConversationEvicted | LevelWarning
)


class EventDispatcher:
    """Hands events to ``deliver`` in order, on one thread, started with the first event.

    :param deliver: usually :meth:`strata_core.plugins.Plugins.observe`, which never raises.
    :param capacity: how many events may wait. Beyond it new events are dropped and counted in :attr:`dropped`;
        the first drop is logged.
    """

    def __init__(self, deliver: Callable[[Event], None], *, capacity: int = 1024):
        self._deliver = deliver
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.dropped = 0
        """Events that nobody saw: the queue was full, or the dispatcher closed."""

    def emit(self, event: Event) -> None:
        """Queue ``event`` and return at once. Any thread; never blocks, never raises."""
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.dropped += 1
                if self.dropped == 1:
                    log.warning("observers are too slow: %d events wait, newer ones are dropped", self._queue.qsize())
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="strata-events", daemon=True)
                self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Deliver what waits, then stop; returns after ``timeout`` seconds even if an observer hangs."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            log.warning("observers did not take the last %d events within %g s", self._queue.qsize(), timeout)
            return
        thread.join(timeout)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)
