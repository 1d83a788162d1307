"""Pages without bytes, and levels that keep the account of a disk without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import attrs
import numpy as np

from strata_core.compute.base import Event, PageStore
from strata_core.compute.reference.pages import Completed
from strata_core.conversations.index import PrefixIndex, Query
from strata_core.errors import LevelError
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.simulate.clock import SimClock
from strata_core.simulate.config import Disk
from strata_core.store.base import Entry, Level, Outcome, Usage

#: Bytes an entry takes on a disk beside its pages: names, ids' index, manifest.
ENTRY_OVERHEAD = 4096

_NOTHING = np.empty(0, np.uint8)


class VirtualPageStore(PageStore):
    """Pages that have a size and no content."""

    def __init__(self, layout: PageLayout, chunk_pages: int):
        self.layout = layout
        self.chunk_pages = chunk_pages

    def add_chunk(self, chunk: int) -> None:
        pass

    def drop_chunk(self, chunk: int) -> None:
        pass

    def copy(self, source: int, target: int) -> None:
        pass

    def download(self, pages: Sequence[int], target: np.ndarray) -> Event:
        return Completed()

    def upload(self, source: np.ndarray, pages: Sequence[int]) -> Event:
        return Completed()

    def host_view(self, page: int) -> np.ndarray | None:
        return _NOTHING

    def close(self) -> None:
        pass


def virtual_pool(page_tokens: int, page_bytes: int, max_pages: int) -> PagePool:
    """A pool of pages that weigh ``page_bytes``, in one chunk: there is no memory to give back."""
    layout = PageLayout("full", "f16", page_tokens, (), page_bytes)
    return PagePool(VirtualPageStore(layout, max_pages), max_pages)


@attrs.define(eq=False)
class _Work:
    """A write that goes on in the background until ``due``."""

    entry: Entry
    kind: Any
    nbytes: int
    seconds: float
    due: float
    pages: HeldPages | None


class DiskLevel(Level):
    """A level below RAM: the contract of one, with sizes and times instead of files. Its writes follow each other.

    :ivar written: bytes written so far.
    """

    loads_aside = True

    def __init__(self, disk: Disk, pool: PagePool, clock: SimClock):
        self.name = disk.name
        self.rank = disk.rank
        self.disk = disk
        self.written = 0
        self._pool = pool
        self._clock = clock
        self._bytes = 0
        self._free_at = 0.0
        self._entries: dict[str, Entry] = {}
        self._leaving: set[str] = set()
        self._index: PrefixIndex[str] = PrefixIndex()
        self._holders: Counter[bytes] = Counter()  # entries that hold each page, those that are leaving not counted
        self._work: list[_Work] = []

    # -- the contract -------------------------------------------------------------------------------------------

    def entries(self) -> Collection[Entry]:
        return list(self._entries.values())

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        return [(self._entries[key], shared) for key, shared in self._index.longest(query, excluded)]

    def usage(self) -> Usage:
        return Usage(self._bytes, len(self._entries) - len(self._leaving), self.disk.max_bytes, self.disk.max_entries)

    def weigh(self, entries: Collection[Entry]) -> int:
        pages = len({address for entry in entries for address in entry.addresses})
        return sum(self._own_bytes(entry) for entry in entries) + pages * self._pool.layout.nbytes

    def cost(self, entry: Entry) -> int:
        fresh = sum(address not in self._holders for address in entry.addresses)
        return fresh * self._pool.layout.nbytes + self._own_bytes(entry)

    def put(self, entry: Entry, pages: HeldPages) -> Outcome | None:
        self._begin(entry, "stored", pages)
        return None

    def adopt(self, entry: Entry, source: Level) -> None:
        self._begin(entry, "adopted", None)

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        for block in range(sink.blocks):
            sink.filled(block)

    def remove(self, entry: Entry) -> None:
        self._set_charged(self._entries[entry.id], entry.id in self._leaving, False)
        del self._entries[entry.id]
        self._leaving.discard(entry.id)
        self._index.remove(entry.id)
        for work in [work for work in self._work if work.entry.id == entry.id]:
            self._work.remove(work)
            _release(work)

    def update(self, entry: Entry) -> None:
        self._entries[entry.id] = entry

    def holds(self, entry_id: str) -> bool:
        return entry_id in self._entries

    def set_leaving(self, entry: Entry, leaving: bool) -> None:
        was = entry.id in self._leaving
        (self._leaving.add if leaving else self._leaving.discard)(entry.id)
        self._set_charged(entry, was, not leaving)

    def busy(self) -> bool:
        return bool(self._work)

    def poll(self) -> Sequence[Outcome]:
        done = [work for work in self._work if work.due <= self._clock.now]
        for work in done:
            self._work.remove(work)
            _release(work)
        return [Outcome(work.kind, work.entry, work.nbytes, 1, work.seconds) for work in done]

    def settle(self) -> None:
        # The engine stands still meanwhile.
        for work in self._work:
            self._clock.wait_until(work.due)
            _release(work)

    # -- the account --------------------------------------------------------------------------------------------

    def _begin(self, entry: Entry, kind: str, pages: HeldPages | None) -> None:
        usage, cost = self.usage(), self.cost(entry)
        if usage.max_bytes is not None and usage.bytes + cost > usage.max_bytes:
            raise LevelError(f"no room: {usage.bytes} bytes held, {cost} more, {usage.max_bytes} allowed")
        self._entries[entry.id] = entry
        self._index.add(entry.id, entry)
        self._set_charged(entry, True, True)
        self.written += cost
        seconds = cost / self.disk.write_rate
        due = self._free_at = max(self._clock.now, self._free_at) + seconds
        held = pages.fork(pages.tokens) if pages is not None else None
        self._work.append(_Work(entry, kind, cost, seconds, due, held))
        self._clock.at(due, lambda: None)  # an event at which poll is asked

    def _set_charged(self, entry: Entry, uncharged: bool, charge: bool) -> None:
        """Count an entry's pages, or count them no more.

        :param uncharged: whether they are not counted now.
        """
        if charge and uncharged:
            self._bytes += self.cost(entry)
            self._holders.update(entry.addresses)
        elif not charge and not uncharged:
            for address in entry.addresses:
                self._holders[address] -= 1
                if not self._holders[address]:
                    del self._holders[address]
            self._bytes -= self.cost(entry)  # what it would add now is what it no longer holds

    def _own_bytes(self, entry: Entry) -> int:
        layout = self._pool.layout
        tail = layout.pages_for(len(entry.tokens)) - len(entry.addresses)
        return tail * layout.nbytes + int(entry.tokens.nbytes) + ENTRY_OVERHEAD


def _release(work: _Work) -> None:
    if work.pages is not None:
        work.pages.release()
        work.pages = None


class SimReader(Executor):
    """Runs the restores of :class:`~strata_core.conversations.restoring.Restorer`, one after the other, as long as
    their levels' rates say.

    :ivar seconds: spent reading, by level.
    """

    def __init__(self, clock: SimClock, rates: Mapping[str, float], nbytes: Callable[[int], int]):
        self._clock = clock
        self._rates = rates
        self._nbytes = nbytes
        self._free_at = 0.0
        self.seconds: Counter[str] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        (restore,) = args
        name = restore.found.level.name
        seconds = self._nbytes(restore.tokens) / self._rates[name]
        self.seconds[name] += seconds  # type: ignore[assignment]  # counters of seconds are no less counters
        self._free_at = max(self._clock.now, self._free_at) + seconds
        future: Future[Any] = Future()
        fn(restore)
        self._clock.at(self._free_at, lambda: future.set_result(None))
        return future
