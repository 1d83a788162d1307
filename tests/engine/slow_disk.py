"""Two levels below RAM that behave as disks do, late and fallibly, for tests of what the engine makes of that.

A plugin: importing it registers ``warm`` and ``cold``, as far as :data:`CONFIG` has them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import attrs
import numpy as np

from strata_core.conversations.index import PrefixIndex, Query
from strata_core.errors import CannotAdopt, DamagedEntry, LevelError
from strata_core.hookspecs import hookimpl
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, LevelContext, LevelFactory, Outcome, Usage


@attrs.define
class Behaviour:
    """How a level behaves. ``delay``: polls until a write is complete. ``gate``: what loads wait for."""

    max_bytes: int = 1 << 30
    delay: int = 0
    load_s: float = 0.0
    gate: threading.Event | None = None
    fail_writes: bool = False
    refuse: bool = False
    adopts: bool = True
    unreadable: bool = False
    damaged: set[str] = attrs.field(factory=set)


CONFIG: dict[str, Behaviour] = {}


@attrs.define(eq=False)
class _Stored:
    entry: Entry
    blocks: list[tuple[np.ndarray, ...]] = attrs.field(factory=list)
    pages: HeldPages | None = None
    source: Level | None = None
    countdown: int = 0
    leaving: bool = False


class SlowDisk(Level):
    loads_aside = True

    def __init__(self, name: str, rank: int, context: LevelContext, behaviour: Behaviour):
        self.name, self.rank, self.behaviour = name, rank, behaviour
        self._block = context.page_bytes
        self._page_tokens = context.page_tokens
        self._stored: dict[str, _Stored] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self.written = 0

    def entries(self) -> Collection[Entry]:
        return [s.entry for s in self._stored.values()]

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        return [(self._stored[key].entry, n) for key, n in self._index.longest(query, excluded)]

    def usage(self) -> Usage:
        weighing = [s.entry for s in self._stored.values() if not s.leaving]
        return Usage(self.weigh(weighing), len(self._stored), self.behaviour.max_bytes, None)

    def weigh(self, entries: Collection[Entry]) -> int:
        return sum(self.cost(entry) for entry in entries)

    def cost(self, entry: Entry) -> int:
        return -(-len(entry.tokens) // self._page_tokens) * self._block

    def put(self, entry: Entry, pages: HeldPages) -> Outcome | None:
        if self.behaviour.refuse:
            raise LevelError("told to refuse")
        self._add(_Stored(entry, pages=pages.fork(pages.tokens), countdown=self.behaviour.delay))
        return None

    def adopt(self, entry: Entry, source: Level) -> None:
        if not self.behaviour.adopts:
            raise CannotAdopt("told not to know how")
        if self.behaviour.refuse:
            raise LevelError("told to refuse")
        self._add(_Stored(entry, source=source, countdown=self.behaviour.delay))

    def set_leaving(self, entry: Entry, leaving: bool) -> None:
        self._stored[entry.id].leaving = leaving

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        time.sleep(self.behaviour.load_s)
        if self.behaviour.gate is not None:
            self.behaviour.gate.wait(30)
        if self.behaviour.unreadable:
            raise LevelError("told to be unreadable")
        if entry.id in self.behaviour.damaged:
            self.remove(entry)
            raise DamagedEntry("told to be damaged")
        stored = self._stored[entry.id]
        blocks = stored.blocks or self._copy(stored)
        for number in range(sink.blocks):
            for buffer, data in zip(sink.buffers(number), blocks[number], strict=True):
                buffer[:] = data
            sink.filled(number)
        for position in sink.states:
            number = sink.state(position)
            sink.buffers(number)[0][:] = blocks[-1 - entry.states[::-1].index(position)][0]
            sink.filled(number)

    def remove(self, entry: Entry) -> None:
        stored = self._stored.pop(entry.id)
        self._index.remove(entry.id)
        if stored.pages is not None:
            stored.pages.release()

    def update(self, entry: Entry) -> None:
        self._stored[entry.id].entry = entry

    def busy(self) -> bool:
        return any(s.pages is not None or s.source is not None for s in self._stored.values())

    def poll(self) -> Sequence[Outcome]:
        outcomes = []
        for stored in [s for s in self._stored.values() if s.pages is not None or s.source is not None]:
            if stored.countdown:
                stored.countdown -= 1
                continue
            outcomes.append(self._complete(stored))
        return outcomes

    def settle(self) -> None:
        for stored in self._stored.values():
            stored.countdown = 0

    def flush(self) -> None:
        self.settle()

    def close(self) -> None:
        for entry in self.entries():
            self.remove(entry)

    def _add(self, stored: _Stored) -> None:
        self._stored[stored.entry.id] = stored
        self._index.add(stored.entry.id, stored.entry)

    def _complete(self, stored: _Stored) -> Outcome:
        entry, pages, source = stored.entry, stored.pages, stored.source
        if self.behaviour.fail_writes:
            del self._stored[entry.id]
            self._index.remove(entry.id)
            return Outcome("failed", entry, error="told to fail", pages=pages)
        stored.blocks = self._copy(stored)
        stored.pages = stored.source = None
        if pages is not None:
            pages.release()
        nbytes = self.cost(entry)
        self.written += nbytes
        return Outcome("adopted" if source is not None else "stored", entry, nbytes=nbytes, parts=1)

    def _copy(self, stored: _Stored) -> list[tuple[np.ndarray, ...]]:
        if stored.source is not None:
            assert isinstance(stored.source, SlowDisk)
            return stored.source._stored[stored.entry.id].blocks
        assert stored.pages is not None
        blocks = []
        for pages in zip(*stored.pages.tables, strict=True):
            block = []
            for pool, page in zip(stored.pages.pools, pages, strict=True):
                data = np.empty((1, pool.layout.nbytes), np.uint8)
                pool.store.download([page], data).wait()
                block.append(data[0])
            blocks.append(tuple(block))
        if stored.pages.states is not None:  # behind the blocks
            for page in stored.pages.states.pages:
                data = np.empty((1, stored.pages.states.pool.layout.nbytes), np.uint8)
                stored.pages.states.pool.store.download([page], data).wait()
                blocks.append((data[0],))
        return blocks


@hookimpl
def strata_register_levels(register: Callable[[LevelFactory], None]) -> None:
    for name, rank in (("warm", 10), ("cold", 20)):
        register(LevelFactory(name, rank, _maker(name, rank)))


def _maker(name: str, rank: int) -> Callable[[LevelContext], Level | None]:
    return lambda context: SlowDisk(name, rank, context, CONFIG[name]) if name in CONFIG else None
