"""The engine: one thread that owns backend, pool, slots and index, and the calls that other threads may make."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs

from strata_core.conversations.keeper import Keeper
from strata_core.engine import kept
from strata_core.engine.core import CoreOptions, EngineCore
from strata_core.engine.report import conversations, level_infos, snapshot
from strata_core.engine.requests import Request, RequestHandle, RequestRecord
from strata_core.engine.stats import ConversationInfo, EngineStats, LevelInfo, SlotInfo
from strata_core.engine.trace import TraceRecorder
from strata_core.errors import BackendError, ContextLengthExceeded, InvalidRequest, NotFound, Overloaded, StrataError
from strata_core.events import Event, ServerReady
from strata_core.models.base import Geometry, Model
from strata_core.tokens.template import ChatTemplate
from strata_core.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_core.plugins import Plugins
    from strata_core.settings.core import Settings

log = logging.getLogger("strata.engine")

T = TypeVar("T")

#: How many ended requests ``record`` still answers for.
RECORDS = 1024
#: How often levels with background work are asked whether it is done, while there is nothing else to do.
POLL_S = 0.05
#: How old what is reported of running requests may become: making it takes a noticeable part of a short step.
PUBLISH_S = 0.05


@attrs.frozen(eq=False)
class Parts:
    """What an engine is made of; :func:`strata_core.engine.opening.open_engine` puts it together.

    :ivar aliases: names beside ``name`` under which clients may ask for it.
    :ivar facts: what a status page shows of it: backend, K/V type, page size, identity parts ...
    :ivar trace: records what requests were about, where that is asked for.
    :ivar close: frees backend, pools and model file after the thread has ended.
    """

    name: str
    aliases: tuple[str, ...]
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate | None
    keeper: Keeper
    weights_bytes: int
    facts: Mapping[str, object]
    trace: TraceRecorder | None
    emit: Callable[[Event], None]
    close: Callable[[], None]


class Engine:
    """Serves one model. Usable as a library::

        with Engine.open(Settings(model="default"), Plugins.load()) as engine:
            handle = engine.submit(Request(prompt=engine.tokenizer.encode_prompt("Hello")))
            print(handle.result().text)

    All methods may be called from any thread.

    :param queue: requests that may wait beyond those that have a slot.
    """

    def __init__(self, parts: Parts, options: CoreOptions, *, queue: int):
        self.name = parts.name
        self.aliases = parts.aliases
        self.tokenizer = parts.tokenizer
        self.template = parts.template
        self.geometry: Geometry = parts.model.geometry
        self.max_context = options.max_context
        self.parallel = options.parallel
        self.facts = parts.facts
        self._parts = parts
        self._queue = queue
        self._core = EngineCore(
            parts.model, parts.tokenizer, parts.keeper, options, emit=parts.emit, ended=self._on_ended,
            trace=parts.trace.take if parts.trace is not None else None,
        )
        self._wake = threading.Condition()
        self._inbox: deque[RequestHandle] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._open = 0  # requests submitted and not ended
        self._working = 0  # uses of :meth:`working`
        self._accepting = True
        self._closing = False
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._stats = snapshot(self._core, parts.weights_bytes)
        self._published = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="strata-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, settings: Settings, plugins: Plugins, *, progress: Callable[[str, float], None] | None = None
    ) -> Engine:
        """Load what the settings say and start.

        :param progress: called with what is being done and the fraction of it that is done.
        :raises StrataError: the model, backend or memory is not to be had.
        """
        from strata_core.engine.opening import open_engine

        return open_engine(settings, plugins, progress or (lambda what, fraction: None))

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request.

        :raises InvalidRequest: an empty prompt, or ids the model does not have.
        :raises ContextLengthExceeded: prompt, or prompt and ``max_tokens``, exceed the context.
        :raises Overloaded: the queue is full or the engine takes no more requests.
        """
        self._check(request)
        handle = RequestHandle(request, self._notify)
        with self._wake:
            if not self._accepting:
                raise Overloaded("the server is shutting down", retry_after=5)
            if self._open >= self.parallel + self._queue:
                raise Overloaded(
                    f"{self.parallel} requests are running and {self._queue} are waiting", retry_after=self._retry()
                )
            self._open += 1
            self._inbox.append(handle)
            self._wake.notify_all()
        return handle

    def _check(self, request: Request) -> None:
        prompt, limit = len(request.prompt), self.max_context
        if not prompt:
            raise InvalidRequest("the prompt is empty: it must have at least one token", param="prompt")
        low, high = int(request.prompt.min()), int(request.prompt.max())
        if low < 0 or high >= self.geometry.vocab:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is not in 0..{self.geometry.vocab - 1}", param="prompt")
        biased = [i for i in request.sampling.logit_bias if not 0 <= i < self.geometry.vocab]
        if biased:
            raise InvalidRequest(f"token id {biased[0]} is not in 0..{self.geometry.vocab - 1}", param="logit_bias")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
        if prompt > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens, the context holds {limit}", param="messages"
            )
        if request.max_tokens is not None and prompt + request.max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens and {request.max_tokens} more are asked for, {prompt} + "
                f"{request.max_tokens} = {prompt + request.max_tokens}; the context holds {limit}",
                param="max_tokens",
            )

    def _retry(self) -> int:
        """Seconds after which a place is likely: the average run time of recent requests, at most a minute."""
        recent = [r for r in list(self._records.values())[-32:] if r.read_s is not None]
        if not recent:
            return 1
        mean = sum((r.read_s or 0.0) + (r.generate_s or 0.0) for r in recent) / len(recent)
        return max(1, min(60, round(mean)))

    def record(self, request_id: str) -> RequestRecord:
        """The ledger of a request that has ended.

        :raises NotFound: it has not ended, or is too long ago.
        """
        try:
            return self._records[request_id]
        except KeyError:
            raise NotFound(f"no record of request {request_id!r}; the last {RECORDS} ended ones are kept") from None

    # -- reports ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of at most :data:`PUBLISH_S` and a step ago, and of the end of every request that has
        ended; never waits for a step."""
        with self._wake:
            waiting = len(self._inbox)
        return attrs.evolve(self._stats, queued=self._stats.queued + waiting)

    def slots(self) -> tuple[SlotInfo, ...]:
        """The slots, of the same moment as :meth:`stats`."""
        return self._stats.slots

    def levels(self) -> tuple[LevelInfo, ...]:
        """The storage levels now."""
        return self.call(lambda core: level_infos(core, counting=True))

    def conversations(self) -> list[ConversationInfo]:
        """All that can be resumed now, the most recently used first."""
        return self.call(conversations)

    def pin_conversation(self, conversation: str, pinned: bool, tenant: str | None = None) -> None:
        """Protect a conversation from eviction, or no longer; with ``tenant``, only that tenant's copies.

        :raises NotFound: nothing of that id is kept.
        """
        self.call(lambda core: kept.pin(core, conversation, pinned, tenant))

    def delete_conversation(self, conversation: str, tenant: str | None = None) -> None:
        """Forget a conversation in slots and on all levels; with ``tenant``, only that tenant's copies.

        :raises NotFound: nothing of that id is kept. :raises InvalidRequest: a request is running in it.
        """
        self.call(lambda core: kept.delete(core, conversation, tenant))

    def announce(self, url: str) -> None:
        """Tell observers that requests are taken at ``url``."""
        self._parts.emit(ServerReady(url=url, model=self.name, backend=str(self.facts["backend"])))

    def call(self, action: Callable[[EngineCore], T]) -> T:
        """Run something on the engine thread between two steps, and wait for its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action(self._core))
            except BaseException as error:  # noqa: BLE001 - it is raised in the calling thread
                future.set_exception(error)

        with self._wake:
            if self._closing:
                raise Overloaded("the engine is closed")
            self._calls.append(run)
            self._wake.notify_all()
        return future.result()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep the engine open while something beside requests uses its pages, between several :meth:`call`.

        :raises Overloaded: the engine takes no more work.
        """
        with self._wake:
            if not self._accepting:
                raise Overloaded("the server is shutting down", retry_after=5)
            self._working += 1
        try:
            yield
        finally:
            with self._wake:
                self._working -= 1
                self._wake.notify_all()

    # -- the end ------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        with self._wake:
            self._accepting = False

    def drain(self, timeout: float) -> None:
        """Take no more requests, wait for those there are, end what is left after ``timeout`` seconds, park all."""
        self.stop_accepting()
        with self._wake:
            self._wake.wait_for(lambda: self._closing or not (self._open or self._working), timeout)
            if self._closing:
                return

        def end(core: EngineCore) -> None:
            core.abort_all(Overloaded("the server is shutting down"))
            core.shut_down()

        self.call(end)

    def close(self) -> None:
        """Stop the thread, ending what still runs, and free everything. Closing twice is harmless."""
        with self._wake:
            if self._closing:
                return
            self._accepting = False
            # What holds pages still reads them; it is disk work of a bounded size.
            self._wake.wait_for(lambda: self._closing or not self._working)
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        self._parts.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _on_ended(self, record: RequestRecord) -> None:
        with self._wake:  # submitting threads look through the records
            self._records[record.id] = record
            while len(self._records) > RECORDS:
                self._records.popitem(last=False)
            self._open -= 1
            self._wake.notify_all()

    def _run(self) -> None:
        busy = True
        while True:
            with self._wake:
                if not busy and not self._has_mail():
                    self._wake.wait(POLL_S if self._core.working_behind() else None)
                self._core.waiting.extend(self._inbox)
                self._inbox.clear()
                calls = list(self._calls)
                self._calls.clear()
                closing = self._closing
            for call in calls:
                call()
            if closing:
                break
            busy = self._step()
            if calls or not busy or self._core.ended or time.monotonic() - self._published > PUBLISH_S:
                self._publish()
        self._core.abort_all(Overloaded("the engine was closed"))
        self._core.close()
        self._publish()

    def _publish(self) -> None:
        self._published = time.monotonic()
        self._stats = snapshot(self._core, self._parts.weights_bytes)
        self._core.deliver()

    def _has_mail(self) -> bool:
        cancelled = any(h.cancelled for h in self._core.waiting)
        return bool(self._inbox or self._calls or self._closing or cancelled)

    def _step(self) -> bool:
        try:
            return self._core.step()
        except Exception as error:
            # A bug. The requests it met are ended, so that it cannot repeat for ever; the engine goes on.
            log.exception("the engine's step failed")
            error = error if isinstance(error, StrataError) else BackendError(f"{type(error).__name__}: {error}")
            self._core.abort_all(error)
            return True
