"""Replays a trace: the engine's own decisions, on pages without bytes, in simulated time.

Lookup, slot choice, admission, parking, placement, the ladder, restores and the ledger are the classes that serve
requests. What is made up here is the time that reading, generating and disks take: prompts are read in steps that the
engine's agenda shares out, at the configured rate; every slot generates at its own rate, whatever else goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from strata_core.conversations.identity import Identity
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.placement import decide
from strata_core.engine.admission import Admission
from strata_core.engine.agenda import Reader, share_rows
from strata_core.engine.core import LEAST_MEASURED_ROWS
from strata_core.engine.requests import Request, RequestHandle
from strata_core.engine.slots import Slot
from strata_core.errors import OutOfMemory
from strata_core.simulate.arrivals import Arrivals
from strata_core.simulate.clock import SimClock
from strata_core.simulate.config import SimConfig
from strata_core.simulate.outcome import Outcome
from strata_core.simulate.storage import DiskLevel, SimReader, virtual_pool
from strata_core.simulate.trace import OPENER, Item, Trace
from strata_core.store.base import Level
from strata_core.store.ram import RamLevel

if TYPE_CHECKING:
    from strata_core.tokens.tokenizer import Tokenizer

#: Memory of a host whose size is not limited.
UNLIMITED = 1 << 60


class _NoTokenizer:
    """All that giving a request its slot asks of a tokenizer."""

    space_prefix = False


@attrs.define(eq=False)
class _Run:
    """A request on its way. ``stop``: tokens its slot holds when it ends; ``lost``: how many of its tokens are read
    although they had been computed before, ``reason`` why."""

    item: Item
    handle: RequestHandle
    tokens: np.ndarray
    arrived: float
    stop: int
    lost: int = 0
    reason: str = ""


class Replay:
    """One replay of a trace against a configuration.

    :param progress: called with the fraction that is done.
    """

    def __init__(self, trace: Trace, config: SimConfig, progress: Callable[[float], None] = lambda fraction: None):
        self._trace = trace
        self._config = config
        self._progress = progress
        self._clock = SimClock()
        self.outcome = Outcome(config.label)
        self._pool = virtual_pool(config.page_tokens, config.page_bytes, config.max_pages)
        self._disks = [DiskLevel(disk, self._pool, self._clock) for disk in config.disks]
        rates = {disk.name: disk.read_rate for disk in config.disks}
        self._reader = SimReader(self._clock, rates, lambda tokens: self._keeper.restorer.nbytes(tokens))
        self._keeper = Keeper(
            Identity.of({"weights": "simulated"}),
            [self._pool],
            [*self._ram(), *self._disks],
            config.options,
            openers=frozenset({OPENER}),
            copies=False,
            max_context=config.max_context,
            spell=lambda token: None,  # texts are not in a trace
            available=self._available,
            admit=decide,
            emit=lambda event: None,
            clock=self._clock,
            reader=self._reader,
        )
        self._slots = [Slot(number) for number in range(config.parallel)]
        tokenizer = cast("Tokenizer", _NoTokenizer())
        self._admission = Admission(self._keeper, tokenizer, self._slots, config.max_context)
        self._runs: dict[str, _Run] = {}
        self._waiting: deque[_Run] = deque()
        self._stepping = False
        self._polling = False

    def run(self, until: float = float("inf")) -> Outcome:
        """Replay until the second ``until``, or until everything has ended."""
        self._arrivals = Arrivals(self._trace.items, self._config.arrivals, self._arrive)
        while self._clock.step(until):
            self._settle()
        self._finish(until)
        return self.outcome

    def _available(self) -> int:
        host = self._config.host_bytes
        return (UNLIMITED if host is None else host) - self._pool.used * self._config.page_bytes

    def _ram(self) -> list[Level]:
        config = self._config
        if not config.ram_bytes:
            return []
        entries = UNLIMITED if config.ram_entries is None else config.ram_entries
        return [RamLevel([self._pool], copies=False, max_bytes=config.ram_bytes, max_entries=entries)]

    # -- requests come and get a slot ---------------------------------------------------------------------------

    def _arrive(self, item: Item, when: float) -> None:
        def come() -> None:
            tokens = self._trace.tokens(item)
            request = Request(
                prompt=tokens[: item.prompt], cache=item.cache, pin=item.pin, tenant=item.tenant, id=item.id,
                after=item.after,
            )  # fmt: skip
            handle = RequestHandle(request, lambda: None)
            # The last token that was generated is never computed.
            stop = item.prompt + item.generated - 1 if item.complete else item.computed
            self._waiting.append(_Run(item, handle, tokens, self._clock.now, stop))

        self._clock.at(when, come)

    def _settle(self) -> None:
        """What the engine does between two steps."""
        for slot in self._slots:
            if slot.restoring:
                self._admission.poll(slot)
                self._begun(slot)
        self._admit()
        self._keeper.poll()
        self._step()
        if self._keeper.parking.waiting() and not self._polling:
            self._polling = True
            self._clock.at(self._clock.now + self._config.options.throttle_s, self._polled)

    def _polled(self) -> None:
        self._polling = False

    def _admit(self) -> None:
        for run in list(self._waiting):
            free = [slot for slot in self._slots if slot.task is None]
            if not free:
                return
            if run.item.after is not None and self._unread(run.item.after):
                continue
            self._waiting.remove(run)
            self._runs[run.item.id] = run
            self._admission.start(run.handle, free)
            slot = next(slot for slot in free if slot.task is not None)
            self._begun(slot)

    def _unread(self, request_id: str) -> bool:
        if any(run.item.id == request_id for run in self._waiting):
            return True
        return any(s.task is not None and s.task.handle.id == request_id and self._reading(s) for s in self._slots)

    def _begun(self, slot: Slot) -> None:
        """Take note of what a request resumed from, once it is there."""
        task = slot.task
        if task is None or slot.restoring:
            return
        run = self._runs[task.handle.id]
        run.lost = sum(item.tokens for item in task.reread)
        run.reason = task.reread[0].reason if task.reread else ""
        outcome = self.outcome
        outcome.prompt += len(task.prompt)
        outcome.reused.update(task.reused)
        outcome.hits[next(iter(task.reused), "none")] += 1
        if slot.computed >= run.stop:  # it was cancelled before it had read as much as it now resumes
            self._end(slot)

    # -- reading and generating ---------------------------------------------------------------------------------

    def _reading(self, slot: Slot) -> bool:
        if slot.task is None or slot.restoring:
            return False
        run = self._runs[slot.task.handle.id]
        return slot.computed < min(run.item.prompt, run.stop)

    def _step(self) -> None:
        """Begin a step of prompt reading, where none is under way and there is something to read."""
        if self._stepping:
            return
        reading = [slot for slot in self._slots if self._reading(slot)]
        reading.sort(key=lambda slot: self._runs[slot.task.handle.id].arrived if slot.task else 0.0)
        readers = []
        for slot in reading:
            assert slot.task is not None
            run = self._runs[slot.task.handle.id]
            readers.append(Reader(slot.id, min(run.item.prompt, run.stop) - slot.computed, slot.task.starved))
        agenda = self._config.agenda
        decoding = sum(slot.task is not None and not slot.restoring for slot in self._slots) - len(reading)
        shares = share_rows(decoding, readers, chunk=agenda.chunk, budget=agenda.budget, age=agenda.age)
        for slot in reading:
            assert slot.task is not None
            slot.task.starved = 0 if slot.id in shares else slot.task.starved + 1
        if not shares:
            return
        seconds = sum(shares.values()) / self._config.read_rate
        self._stepping = True

        def done() -> None:
            self._stepping = False
            self.outcome.reading_s += seconds
            if sum(shares.values()) >= LEAST_MEASURED_ROWS:
                self._keeper.read_rate = self._config.read_rate
            for number, rows in shares.items():
                self._read(self._slots[number], rows)

        self._clock.at(self._clock.now + seconds, done)

    def _read(self, slot: Slot, rows: int) -> None:
        assert slot.task is not None
        run, task = self._runs[slot.task.handle.id], slot.task
        before = slot.computed
        again = max(0, min(before + rows, task.cached + run.lost) - before)
        if again:
            self.outcome.reread[run.reason] += again
            self.outcome.rereads.append((self._clock.now, again))
        self.outcome.read += rows
        if not self._compute(slot, rows):
            return
        if slot.computed >= run.item.prompt:
            self.outcome.first_token_s.append(self._clock.now - run.arrived)
            self._generate(slot, run)
        elif slot.computed >= run.stop:
            self._end(slot)

    def _generate(self, slot: Slot, run: _Run) -> None:
        """Generate up to a page more, or end."""
        left = run.stop - slot.computed
        if left <= 0:
            self._end(slot)
            return
        rows = min(left, self._config.page_tokens)

        def done() -> None:
            if self._compute(slot, rows):
                self._generate(slot, run)

        self._clock.at(self._clock.now + rows / self._config.generate_rate, done)

    def _compute(self, slot: Slot, rows: int) -> bool:
        """Let a slot hold so many tokens more. False when there is no memory for them, which ends the request."""
        assert slot.task is not None
        assert slot.live is not None
        run, done = self._runs[slot.task.handle.id], slot.computed
        while True:
            try:
                slot.live.table.prepare(done, rows)
                break
            except OutOfMemory:
                if not self._keeper.reclaim():
                    self.outcome.counts["out_of_memory"] = self.outcome.counts.get("out_of_memory", 0) + 1
                    self._keeper.forget(slot.live, "damaged: out_of_memory")
                    slot.live = None
                    self._end(slot)
                    return False
        slot.live.tokens.extend(run.tokens[done : done + rows])
        return True

    def _end(self, slot: Slot) -> None:
        assert slot.task is not None
        run = self._runs.pop(slot.task.handle.id)
        if not run.item.complete and slot.live is not None:
            slot.live.truncate(slot.computed - slot.computed % slot.live.page_tokens)
        slot.vacate(self._keeper)
        self.outcome.requests += 1
        self._progress(self.outcome.requests / len(self._trace.items))
        self._arrivals.ended(run.item, self._clock.now)

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(self, until: float) -> None:
        outcome, ladder = self.outcome, self._keeper.ladder
        outcome.seconds = min(until, self._clock.now)
        outcome.unfinished = len(self._trace.items) - outcome.requests
        outcome.written = {level.name: level.written for level in self._disks}
        outcome.restoring_s = dict(self._reader.seconds)
        names = ("evictions", "demotions", "disk_evictions", "superseded", "spilled")
        outcome.counts |= {name: ladder.counts[name] for name in names}
        outcome.counts["discards"] = self._keeper.discards
        outcome.counts["compacted"] = self._keeper.parking.counts["compacted"]
        outcome.counts["restore_failures"] = self._keeper.restore_failures
