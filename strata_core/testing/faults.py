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

    def put(self, entry: Entry, pages: HeldPages) -> None:
        self._fail("put")
        self.inner.put(entry, pages)

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

    def busy(self) -> bool:
        return self.inner.busy()

    def poll(self) -> Sequence[Outcome]:
        self._fail("poll")
        return self.inner.poll()

    def settle(self) -> None:
        self._fail("settle")
        self.inner.settle()

    def close(self) -> None:
        self.inner.close()
