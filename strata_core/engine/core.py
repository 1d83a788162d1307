"""The engine without its thread: slots, queue, and one step at a time.

Everything here runs on one thread, so nothing is locked. The order of a step is: cancellations, new requests into free
slots, then one pass through the model over the rows the agenda chose.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import attrs
import numpy as np

from strata_core.compute.scoring import Scoring
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.live import Live
from strata_core.engine.admission import Admission
from strata_core.engine.agenda import Reader, share_rows
from strata_core.engine.drafting import Drafting
from strata_core.engine.logprobs import token_info
from strata_core.engine.requests import Delta, Failed, Finished, Progress, RequestHandle, RequestRecord, TokenInfo
from strata_core.engine.slots import Slot, Task
from strata_core.engine.stats import Counters
from strata_core.engine.step import Rows, Stepper
from strata_core.engine.trace import TracedRequest
from strata_core.errors import Cancelled, StrataError
from strata_core.events import Event, RequestFinished
from strata_core.models.base import Model
from strata_core.settings.core import BatchAgenda
from strata_core.tokens.tokenizer import Tokenizer

log = logging.getLogger("strata.requests")

#: How soon a restore is looked at again while there is nothing to compute.
RESTORE_POLL_S = 0.002
#: A step of fewer prompt rows says little of how fast prompts are read.
LEAST_MEASURED_ROWS = 32


@attrs.frozen
class CoreOptions:
    """:ivar parallel: number of slots; :ivar max_context: most tokens of a sequence.
    :ivar lookup: most tokens guessed ahead per step of a reply from what it says before; 0 guesses none.
    :ivar mtp: the same with the model's own layer, which must be there.
    :ivar scoring: what samplers compute with.
    """

    parallel: int
    max_context: int
    agenda: BatchAgenda = attrs.field(factory=BatchAgenda)
    lookup: int = 0
    mtp: int = 0
    scoring: Scoring = attrs.field(factory=Scoring)


class EngineCore:
    """See the module's docstring.

    :param ended: called with the record of every request that ends, whichever way.
    :param trace: the same, with the tokens it was about; for recording them.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        keeper: Keeper,
        options: CoreOptions,
        *,
        emit: Callable[[Event], None],
        ended: Callable[[RequestRecord], None],
        trace: Callable[[TracedRequest], None] | None = None,
    ):
        self.keeper = keeper
        self.options = options
        self.slots = [Slot(number) for number in range(options.parallel)]
        self.waiting: deque[RequestHandle] = deque()
        self.counters = Counters()
        self._tokenizer = tokenizer
        pools = [*keeper.pools, *([keeper.state_pool] if keeper.state_pool is not None else [])]
        self.model = model
        self._stepper = Stepper(model, [pool.store for pool in pools], keeper.reclaim)
        drafts = {"lookup": options.lookup, "mtp": options.mtp}
        self._drafting = Drafting(model.further, [pool.store for pool in keeper.pools], options.max_context)
        self._admission = Admission(keeper, tokenizer, self.slots, options.max_context, drafts, options.scoring)
        self._emit = emit
        self._ended = ended
        self._trace = trace
        self._last: list[tuple[RequestHandle, Finished | Failed, RequestRecord]] = []

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what is to be done next. False when there is nothing to do."""
        self._cancel()
        for slot in self.slots:
            if slot.restoring:
                self._admission.poll(slot)
        self._admit()
        self.keeper.poll()
        start = time.perf_counter()
        parts = self._plan()
        if not parts:
            return self._await_restores()
        self._stepper.run(parts)
        elapsed = time.perf_counter() - start
        self._account(parts, elapsed)
        for part in parts:
            if part.slot.task is not None:
                self._advance(part.slot, part.slot.task, part)
        self.counters.engine_seconds += time.perf_counter() - start
        return True

    def _await_restores(self) -> bool:
        """With nothing to compute, look again soon at what is being restored. False when that is nothing either."""
        restoring = [s.task.restore for s in self.slots if s.task is not None and s.task.restore is not None]
        for restore in restoring[:1]:
            restore.wait(RESTORE_POLL_S)
        return bool(restoring)

    def _plan(self) -> list[Rows]:
        decoders = self._decoders()
        reading = sorted((s for s in self.slots if s.reading), key=lambda s: s.task.started if s.task else 0.0)
        readers = [Reader(s.id, len(s.task.prompt) - s.computed, s.task.starved) for s in reading if s.task]
        agenda = self.options.agenda
        rows = sum(len(part.tokens) for part in decoders)
        shares = share_rows(rows, readers, chunk=agenda.chunk, budget=agenda.budget, age=agenda.age)
        parts = decoders
        for slot in reading:
            task, rows = slot.task, shares.get(slot.id, 0)
            assert task is not None
            task.starved = 0 if rows else task.starved + 1
            if rows:
                done = slot.computed
                rows = slot.live.until_stop(rows) if slot.live is not None else rows
                parts.append(Rows(slot, task.prompt[done : done + rows], int(done + rows == len(task.prompt))))
        return parts

    def _decoders(self) -> list[Rows]:
        """Rows of the replies that are being generated, with drafts where there are any."""
        tasks = [(slot, slot.task) for slot in self.slots if slot.task is not None]
        parts = [Rows(slot, task.pending, 1) for slot, task in tasks if task.pending is not None]
        self._drafting.add(parts, self.options.agenda.budget // max(1, len(parts)))
        return parts

    def _account(self, parts: list[Rows], elapsed: float) -> None:
        counters = self.counters
        counters.steps += 1
        computed = [part for part in parts if part.error is None]
        rows = sum(len(part.tokens) for part in computed)
        counters.step_rows += rows
        counters.step_failures = self._stepper.failures
        read = sum(len(part.tokens) for part in computed if part.slot.reading)
        counters.read_tokens += read
        if read >= LEAST_MEASURED_ROWS and read == rows:
            rate, known = read / elapsed, self.keeper.read_rate
            self.keeper.read_rate = rate if known is None else 0.7 * known + 0.3 * rate
        # A mixed step's time is shared out by rows: what a reading slot and a decoding slot each cost is not measured.
        share = read / rows if rows else 0.0
        counters.read_seconds += elapsed * share
        counters.generate_seconds += elapsed * (1 - share)

    def _advance(self, slot: Slot, task: Task, part: Rows) -> None:
        if part.error is not None:
            self._failed(slot, task, part.error)
            return
        if part.logits is not None:
            self._generate(slot, task, part, part.logits)
        elif task.request.progress:
            task.handle.put(Progress(slot.computed, len(task.prompt), task.cached))

    def _generate(self, slot: Slot, task: Task, part: Rows, logits: np.ndarray) -> None:
        """Sample what follows the last known token, and then each draft for as long as they are right."""
        known, right = len(part.tokens) - part.drafts, 0
        while True:
            token, end = self._sample(task, logits[right])
            if end is not None or right == part.drafts or token != part.tokens[known + right]:
                break
            right += 1
        again: np.ndarray = part.tokens[:0]
        if part.drafts:
            assert slot.live is not None
            again = part.tokens[: slot.live.accept(part.tokens, known + right, part.hidden)]
            task.drafters[part.kind].learn(part.drafts, right)
            self.counters.drafted_tokens[part.kind] += part.drafts
            self.counters.accepted_tokens[part.kind] += right
        if end is not None:
            self._finish(slot, task, end)
        else:
            task.pending = np.append(again, np.int32(token))

    def _sample(self, task: Task, logits: np.ndarray) -> tuple[int, str | None]:
        """The next token, handed out, and why the reply ends with it, if it does."""
        request = task.request
        banned = self._tokenizer.end_ids if request.ignore_eos else frozenset()
        token = task.sampler.next(logits, banned)
        task.last_token = time.monotonic()
        if task.first_token is None:
            task.first_token = task.last_token
        task.generated += 1
        self.counters.generated_tokens += 1
        if token in self._tokenizer.end_ids and not request.ignore_eos:
            return token, "stop"
        text = task.text.push(token)
        infos: tuple[TokenInfo, ...] = ()
        if request.sampling.logprobs is not None:
            infos = (token_info(logits, token, request.sampling.logprobs, self._tokenizer),)
        task.handle.put(Delta(text, (token,), infos))
        if task.text.stopped is not None:
            return token, "stop"
        return token, "length" if task.generated >= task.limit else None

    # -- beginnings and ends ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for handle in list(self.waiting):
            free = [slot for slot in self.slots if slot.free]
            if not free:
                return
            if handle.request.after is not None and self._unread(handle.request.after):
                continue
            self.waiting.remove(handle)
            try:
                self._admission.start(handle, free)
            except StrataError as error:
                record = RequestRecord.unstarted(handle, error.code)
                self._end(handle, Failed(error, record), record)

    def _unread(self, request_id: str) -> bool:
        """Whether a request still waits or reads its prompt."""
        if any(handle.id == request_id for handle in self.waiting):
            return True
        return any(s.task is not None and s.task.pending is None and s.task.handle.id == request_id for s in self.slots)

    def _cancel(self) -> None:
        for handle in [h for h in self.waiting if h.cancelled]:
            self.waiting.remove(handle)
            record = RequestRecord.unstarted(handle, Cancelled.code)
            self._end(handle, Failed(Cancelled("the request was cancelled while it waited"), record), record)
        for slot in self.slots:
            if slot.task is not None and slot.task.handle.cancelled:
                self._stop(slot, slot.task, Cancelled("the request was cancelled"))

    def _finish(self, slot: Slot, task: Task, reason: str) -> None:
        rest = task.text.finish()
        if rest:
            task.handle.put(Delta(rest))
        record = task.record(reason, self._read(slot, task))
        self._note(task, record, slot.live)
        slot.vacate(self.keeper)
        self._end(task.handle, Finished(reason, task.text.stopped, record), record)

    def _stop(self, slot: Slot, task: Task, error: StrataError) -> None:
        """End a request early. What was really computed stays, up to the last complete page."""
        self._admission.abandon(task)
        record = task.record(error.code, self._read(slot, task))
        if slot.live is not None:
            slot.live.stop()
        self._note(task, record, slot.live)
        slot.vacate(self.keeper)
        self._end(task.handle, Failed(error, record), record)

    def _failed(self, slot: Slot, task: Task, error: StrataError) -> None:
        """A step could not compute this request's rows.

        If it resumed from stored K/V and nothing was said yet, those are the first suspects: they are forgotten and
        the request is read again from the start, once. Otherwise it ends; its K/V are not trusted either way.
        """
        assert slot.live is not None
        suspect = task.cached > 0 and task.generated == 0
        self.keeper.forget(slot.live, f"damaged: {error.code}")
        slot.live = None
        if suspect:
            log.warning("request %s: %s after resuming %d tokens; reading from 0", task.handle.id, error, task.cached)
            if task.origin is not None:
                self.keeper.distrust(task.origin)
            self._admission.restart(slot, task)
            return
        record = task.record(error.code, 0)
        self._note(task, record, None)
        slot.task = None
        self._end(task.handle, Failed(error, record), record)

    def _note(self, task: Task, record: RequestRecord, live: Live | None) -> None:
        """Hand what a request leaves to the trace, where one is recorded."""
        if self._trace is None:
            return
        computed = live.tokens.view() if live is not None else task.prompt[:0]
        tokens = computed if len(computed) >= len(task.prompt) else task.prompt
        request = task.request
        turns = np.flatnonzero(np.isin(tokens, list(self.keeper.openers))).tolist() if self.keeper.openers else ()
        self._trace(
            TracedRequest(
                record, tokens.copy(), len(computed), tuple(turns), request.cache, request.pin, request.after
            )
        )

    @staticmethod
    def _read(slot: Slot, task: Task) -> int:
        """Prompt tokens this request has computed so far."""
        return max(0, min(slot.computed, len(task.prompt)) - task.cached)

    @property
    def ended(self) -> bool:
        """Whether requests have ended whose last event is still to be handed out."""
        return bool(self._last)

    def deliver(self) -> None:
        """Hand out the last events of requests that ended. Called when everything that others can see of the engine
        is up to date, so that who has seen the end of a request also sees it counted."""
        ended, self._last = self._last, []
        for handle, event, record in ended:
            self._ended(record)
            handle.put(event)

    def _end(self, handle: RequestHandle, event: Finished | Failed, record: RequestRecord) -> None:
        self._last.append((handle, event, record))
        counters = self.counters
        counters.requests[record.status] += 1
        counters.prompt_tokens += record.prompt_tokens
        counters.reused.update(record.reused)
        for reread in record.reread:
            counters.reread[reread.reason] += reread.tokens
        log.info("%s", record.line())
        self._emit(
            RequestFinished(
                request_id=record.id,
                finish_reason=record.status,
                prompt_tokens=record.prompt_tokens,
                cached_tokens=record.cached_tokens,
                generated_tokens=record.generated_tokens,
                source=next(iter(record.reused), "none"),
                queue_seconds=record.queued_s or 0.0,
                prefill_seconds=record.read_s or 0.0,
                decode_seconds=record.generate_s or 0.0,
                error=record.status if record.status not in ("stop", "length") else None,
            )
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def park_all(self, reason: str) -> None:
        """Park every live conversation that no request uses."""
        for slot in self.slots:
            if slot.live is not None and slot.task is None:
                self.keeper.park(slot.live, reason)
                slot.live = None

    def shut_down(self) -> None:
        """Put every conversation where it outlasts the process, as far as there is such a place."""
        self.park_all("shutdown")
        self.keeper.save_all()

    def working_behind(self) -> bool:
        """Whether a level still works on something that it must be asked about."""
        return self.keeper.busy()

    def close(self) -> None:
        """Let go of all conversations."""
        for slot in self.slots:
            if slot.live is not None:
                slot.live.release()
                slot.live = None
        self.keeper.close()

    def abort_all(self, error: StrataError) -> None:
        """End every request, waiting or running."""
        for handle in self.waiting:
            record = RequestRecord.unstarted(handle, error.code)
            self._end(handle, Failed(error, record), record)
        self.waiting.clear()
        for slot in self.slots:
            if slot.task is not None:
                self._stop(slot, slot.task, error)
