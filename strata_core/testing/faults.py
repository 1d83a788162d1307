"""A level that fails on demand, around one that works."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strata_core.conversations.index import Query
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Outcome, Usage


class FaultyLevel(Level):
    """Passes every call on to ``inner``, unless it is told to fail.

    :ivar faults: method name -> what calling it raises, now; change it at will.
    """

    def __init__(self, inner: Level):
        self.inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.when_full = inner.when_full
        self.folder = inner.folder
        self.loads_aside = inner.loads_aside
        self.faults: dict[str, Exception] = {}

    def _fail(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]

    def entries(self) -> Collection[Entry]:
        self._fail("entries")
        return self.inner.entries()

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        self._fail("find")
        return self.inner.find(query, excluded)

    def usage(self) -> Usage:
        self._fail("usage")
        return self.inner.usage()

    def weigh(self, entries: Collection[Entry]) -> int:
        self._fail("weigh")
        return self.inner.weigh(entries)

    def cost(self, entry: Entry) -> int:
        self._fail("cost")
        return self.inner.cost(entry)

    def put(self, entry: Entry, pages: HeldPages) -> Outcome | None:
        self._fail("put")
        return self.inner.put(entry, pages)

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        self._fail("load")
        self.inner.load(entry, tokens, sink)

    def held(self, entry: Entry) -> HeldPages | None:
        self._fail("held")
        return self.inner.held(entry)

    def remove(self, entry: Entry) -> None:
        self._fail("remove")
        self.inner.remove(entry)

    def update(self, entry: Entry) -> None:
        self._fail("update")
        self.inner.update(entry)

    def holds(self, entry_id: str) -> bool:
        self._fail("holds")
        return self.inner.holds(entry_id)

    def beginnings(self, entry: Entry) -> list[Entry]:
        self._fail("beginnings")
        return self.inner.beginnings(entry)

    def adopt(self, entry: Entry, source: Level) -> None:
        self._fail("adopt")
        self.inner.adopt(entry, source)

    def set_leaving(self, entry: Entry, leaving: bool) -> None:
        self._fail("set_leaving")
        self.inner.set_leaving(entry, leaving)

    def expired(self, now: float) -> Sequence[Entry]:
        self._fail("expired")
        return self.inner.expired(now)

    def reclaim(self, nbytes: int) -> None:
        self._fail("reclaim")
        self.inner.reclaim(nbytes)

    def flush(self) -> None:
        self._fail("flush")
        self.inner.flush()

    def busy(self) -> bool:
        self._fail("busy")
        return self.inner.busy()

    def poll(self) -> Sequence[Outcome]:
        self._fail("poll")
        return self.inner.poll()

    def settle(self) -> None:
        self._fail("settle")
        self.inner.settle()

    def close(self) -> None:
        self.inner.close()
