"""Bringing stored pages back: by reference where they are in the engine's pools, else through fresh pages.

Reading runs on a thread of its own, so that other slots go on while a large conversation comes back. The engine thread
begins a restore and, when it is done, takes the pages; until then nothing refers to them, so a failure costs only the
fresh pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Protocol

import attrs

from strata_core.clock import Clock
from strata_core.conversations.checkpoints import root_position, worth_restoring
from strata_core.conversations.options import KeeperOptions
from strata_core.conversations.placement import Action, Verdict
from strata_core.errors import LevelError, OutOfMemory
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry

log = logging.getLogger("strata.cache")

#: Weight of the newest observation in a level's observed rate.
SMOOTHING = 0.3
#: A restore at least this small is not measured: its time says more of the machine's noise than of the level.
MEASURABLE_BYTES = 1 << 20
#: For so many seconds an observed rate counts.
RATE_COUNTS_S = 300.0


class Source(Protocol):
    """What pages are restored from: a level, or whatever else has them. See :class:`strata_core.store.base.Level`."""

    @property
    def name(self) -> str: ...
    @property
    def loads_aside(self) -> bool: ...
    def held(self, entry: Entry) -> HeldPages | None: ...
    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None: ...


class Stored(Protocol):
    """An entry and where it is."""

    @property
    def level(self) -> Source: ...
    @property
    def entry(self) -> Entry: ...


@attrs.define(eq=False)
class Restore:
    """A restore under way.

    :ivar states: positions of the states that come too; :ivar nbytes: of all of it.
    :ivar pages: there at once, where the pages are only held once more.
    """

    found: Stored
    tokens: int
    states: tuple[int, ...]
    nbytes: int
    started: float
    pages: HeldPages | None = None
    sink: PageSink | None = None
    reading: Future[None] | None = None

    def done(self) -> bool:
        if self.sink is not None:
            self.sink.pump()
        return self.reading is None or self.reading.done()

    def wait(self, timeout: float) -> None:
        """Block until it is done, or ``timeout`` seconds have passed."""
        if self.reading is not None:
            wait([self.reading], timeout)


@attrs.frozen
class Prices:
    """What decides between restoring and reading, as it was when it was decided. Seconds; None: not yet measured."""

    restore_s: float | None
    read_s: float | None

    @property
    def worth(self) -> bool:
        """Whether restoring is expected to be no slower, or nothing speaks against it yet."""
        return self.restore_s is None or self.read_s is None or self.restore_s <= self.read_s


def prices(nbytes: int, tokens: int, level_rate: float | None, read_rate: float | None) -> Prices:
    """Expected times of restoring ``nbytes`` and of reading ``tokens`` instead. Pure.

    :param level_rate: bytes per second observed at the level; :param read_rate: prompt tokens per second observed.
    """
    return Prices(
        nbytes / level_rate if level_rate else None,
        tokens / read_rate if read_rate else None,
    )


class Rates:
    """At how many bytes per second levels were read, smoothed.

    What was observed long ago says nothing: a level that was slow once would not be asked any more, and so never be
    seen to have recovered.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._known: dict[str, tuple[float, float]] = {}  # level -> rate, and when it was observed last

    def of(self, level: str) -> float | None:
        """None: not known, or not any more."""
        rate, when = self._known.get(level, (None, 0.0))
        return rate if self._clock.monotonic() - when < RATE_COUNTS_S else None

    def observe(self, level: str, rate: float) -> None:
        known = self.of(level)
        smoothed = rate if known is None else (1 - SMOOTHING) * known + SMOOTHING * rate
        self._known[level] = smoothed, self._clock.monotonic()


class Restorer:
    """Engine thread only, but for the reading itself.

    :param ask: asks the admission rules: kind, bytes needed, bytes available.
    :param reclaim: gets back pages of the engine's pools; False when there are none to get back.
    :param reader: runs the reading of levels that allow it; a thread of its own if None.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        options: KeeperOptions,
        available: Callable[[], int | None],
        ask: Callable[[str, int, int | None], Verdict],
        reclaim: Callable[[], bool],
        clock: Clock | None = None,
        reader: Executor | None = None,
        state_pool: PagePool | None = None,
    ):
        self._pools = tuple(pools)
        self._state_pool = state_pool
        self._options = options
        self._available = available
        self._ask = ask
        self._reclaim = reclaim
        self._clock = clock or Clock()
        self._reader = reader or ThreadPoolExecutor(1, "strata-restore")
        self._abandoned: list[Restore] = []
        self.rates = Rates(self._clock)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the pages of so many positions."""
        return sum(pool.layout.pages_for(tokens) * pool.layout.nbytes for pool in self._pools)

    def _states(self, entry: Entry, tokens: int, whole: bool) -> tuple[int, ...]:
        """Positions of the states to bring back with an entry's first ``tokens`` tokens: all, or those that a slot has
        room for. Whoever wrote the entry may have kept more than that."""
        states = tuple(position for position in entry.states or () if position <= tokens)
        if whole:
            return states
        rules, page = self._options.checkpoints, self._pools[0].layout.page_tokens
        return worth_restoring(states, rules.most, root_position(entry.turns, page, rules.root, entry.prefix))

    def _size(self, tokens: int, states: Sequence[int]) -> int:
        """Bytes to bring back."""
        return self.nbytes(tokens) + len(states) * (self._state_pool.layout.nbytes if self._state_pool else 0)

    def prices(self, found: Stored, tokens: int, otherwise: int, read_rate: float | None) -> Prices:
        """What restoring ``tokens`` from a level below RAM costs against resuming ``otherwise`` tokens without it and
        reading the rest."""
        nbytes = self._size(tokens, self._states(found.entry, tokens, False))
        return prices(nbytes, tokens - otherwise, self.rates.of(found.level.name), read_rate)

    def refers(self, found: Stored) -> bool:
        """Whether restoring only holds pages once more, and so needs no room in the pools."""
        return self._held(found) is not None

    def _held(self, found: Stored) -> HeldPages | None:
        """The entry's pages, where they are in the engine's own pools."""
        try:
            held = found.level.held(found.entry)
        except Exception as error:  # noqa: BLE001 - levels come from plugins; the entry may still be read
            log.warning("level %s: %s", found.level.name, error)
            return None
        return held if held is not None and held.pools == self._pools else None

    def begin(self, found: Stored, tokens: int, *, whole: bool = False) -> Restore:
        """Start to bring back the first ``tokens`` positions of an entry.

        :param whole: with all its states there, to be kept elsewhere; else with as many as a slot has room for.
        :raises LevelError: memory admission refuses it. :raises OutOfMemory: the pools have no room.
        """
        states = self._states(found.entry, tokens, whole)
        restore = Restore(found, tokens, states, self._size(tokens, states), self._clock.monotonic())
        held = self._held(found)
        if held is not None:
            restore.pages = held.fork(tokens)
            return restore
        need, available = restore.nbytes, self._available()
        verdict = self._ask("restore", need, available)
        while verdict.action is Action.REFUSE and available is not None and self._reclaim():
            # What is asked for now is worth more than what was parked before.
            available = self._available()
            verdict = self._ask("restore", need, available)
        if verdict.action is Action.REFUSE:
            raise LevelError(f"memory admission; {verdict.reason}")
        if verdict.action is Action.THROUGH:
            log.info(
                "%s hit under the transient RAM floor (need %d MiB plus %d MiB, not %d MiB)",
                found.level.name, need >> 20, self._options.transient_floor >> 20, self._options.parking_floor >> 20,
            )
        restore.sink = self._sink(tokens, states)
        if found.level.loads_aside:
            restore.reading = self._reader.submit(_read, restore)
        else:
            restore.reading = Future()
            _read_here(restore, restore.reading)
        return restore

    def fetch(self, found: Stored) -> HeldPages:
        """All pages of an entry, brought into memory here and now, held for the caller.

        :raises LevelError: they cannot be read. :raises OutOfMemory: the pools have no room.
        """
        restore = self.begin(found, len(found.entry.tokens), whole=True)
        while not restore.done():
            restore.wait(0.01)
        return self.finish(restore)

    def finish(self, restore: Restore) -> HeldPages:
        """The pages of a restore that is done, held for the caller.

        :raises LevelError: it failed; nothing is held.
        """
        if restore.pages is not None:
            return restore.pages
        assert restore.sink is not None
        assert restore.reading is not None
        error = restore.reading.exception()
        if error is not None:
            restore.sink.discard()
            raise error
        pages = restore.sink.finish()
        self._observe(restore)
        return pages

    def abandon(self, restore: Restore) -> None:
        """The restore is not wanted any more. Its pages come back when nothing writes to them."""
        if restore.pages is not None:
            restore.pages.release()
            return
        if restore.sink is not None:
            restore.sink.cancel()
        self._abandoned.append(restore)
        self.poll()

    def poll(self) -> None:
        """Give back the pages of abandoned restores that have ended."""
        for restore in [r for r in self._abandoned if r.done()]:
            self._abandoned.remove(restore)
            if restore.sink is not None:
                restore.sink.discard()

    def busy(self) -> bool:
        return bool(self._abandoned)

    def close(self) -> None:
        """Wait for what is under way; all restores must have been finished or abandoned."""
        while self._abandoned:
            self.poll()
            time.sleep(0.001)
        self._reader.shutdown()

    def _sink(self, tokens: int, states: Sequence[int]) -> PageSink:
        wanted = None if self._state_pool is None else (self._state_pool, states)
        while True:
            try:
                return PageSink(self._pools, tokens, wanted)
            except OutOfMemory:
                if not self._reclaim():
                    raise

    def _observe(self, restore: Restore) -> None:
        nbytes, seconds = restore.nbytes, self._clock.monotonic() - restore.started
        if nbytes >= MEASURABLE_BYTES and seconds > 0:
            self.rates.observe(restore.found.level.name, nbytes / seconds)


def _read(restore: Restore) -> None:
    """On the reading thread, where the level allows it."""
    assert restore.sink is not None
    try:
        restore.found.level.load(restore.found.entry, restore.tokens, restore.sink)
    except LevelError:
        raise
    except Exception as error:
        # Not what the contract allows. A fault of a level must not end the request.
        log.exception("level %s failed", restore.found.level.name)
        raise LevelError(f"{type(error).__name__}: {error}") from error


def _read_here(restore: Restore, future: Future[None]) -> None:
    try:
        _read(restore)
    except LevelError as error:
        future.set_exception(error)
    else:
        future.set_result(None)
