"""The account of a simulated disk is that of a level, and its writes take time."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.errors import LevelError
from strata_core.simulate.clock import SimClock
from strata_core.simulate.config import Disk
from strata_core.simulate.storage import DiskLevel, virtual_pool
from strata_core.store.base import Entry
from strata_core.testing.scene import Scene

PAGE = 1000


class Shelf:
    """A simulated disk of so many bytes that writes 1,000 bytes a second, and entries for it."""

    def __init__(self, max_bytes: int = 1 << 30, name: str = "cold"):
        self.clock = SimClock()
        self.pool = virtual_pool(4, PAGE, 1 << 12)
        self.scene = Scene.build([self.pool.layout], lambda layout: self.pool.store)
        self.scene.pools = (self.pool,)
        self.level = DiskLevel(Disk(name, 20, max_bytes, write_rate=1000.0), self.pool, self.clock)

    def put(self, tokens: object) -> Entry:
        entry = self.scene.entry(np.asarray(tokens, np.int32))
        pages = self.pages(entry)
        try:
            self.level.put(entry, pages)
        finally:
            pages.release()
        return entry

    def pages(self, entry: Entry):  # type: ignore[no-untyped-def]
        from strata_core.pool.table import PageTable

        table = PageTable([self.pool])
        table.prepare(0, len(entry.tokens))
        held = table.hold(len(entry.tokens))
        table.truncate(0)
        return held


def test_cost_is_what_put_adds_and_weight_is_what_is_held() -> None:
    shelf, random = Shelf(), np.random.default_rng(5)
    held: list[Entry] = []
    for step in range(80):
        if held and step % 3 == 2:
            shelf.level.remove(held.pop(int(random.integers(len(held)))))
        else:
            tokens = random.integers(0, 2, random.integers(1, 14))
            entry = shelf.scene.entry(tokens.astype(np.int32))
            cost, before = shelf.level.cost(entry), shelf.level.usage().bytes
            held.append(shelf.put(tokens))
            assert shelf.level.usage().bytes == before + cost
        assert shelf.level.usage().bytes == shelf.level.weigh(held)
        assert shelf.level.usage().entries == len(shelf.level.entries()) == len(held)


def test_writes_follow_each_other_and_hold_their_pages_meanwhile() -> None:
    shelf = Shelf()
    entries = [shelf.put(range(n, n + 8)) for n in (0, 100)]
    seconds = shelf.level.cost(shelf.scene.entry(np.arange(50, 58, dtype=np.int32))) / 1000
    assert shelf.pool.used == 4
    assert [entry.id for entry in shelf.level.poll()] == []
    assert shelf.clock.step(until=10 * seconds)
    assert shelf.clock.now == pytest.approx(seconds)
    assert [outcome.entry for outcome in shelf.level.poll()] == entries[:1]
    assert shelf.pool.used == 2
    assert shelf.level.busy()
    assert shelf.clock.step(until=10 * seconds)
    assert shelf.clock.now == pytest.approx(2 * seconds)
    assert [outcome.kind for outcome in shelf.level.poll()] == ["stored"]
    assert not shelf.level.busy()
    assert shelf.pool.used == 0


def test_settling_waits_as_long_as_the_writes_take() -> None:
    shelf = Shelf()
    shelf.put(range(40))
    shelf.level.settle()
    assert shelf.pool.used == 0
    assert shelf.clock.now == pytest.approx(shelf.level.written / 1000)
    assert len(shelf.level.poll()) == 1


def test_what_is_removed_before_it_was_written_tells_nothing() -> None:
    shelf = Shelf()
    shelf.level.remove(shelf.put(range(40)))
    assert (shelf.pool.used, shelf.level.usage().bytes, shelf.level.busy()) == (0, 0, False)


def test_what_does_not_fit_is_refused_whole() -> None:
    shelf = Shelf(max_bytes=15_000)
    shelf.put(range(8))
    before = shelf.level.usage()
    with pytest.raises(LevelError, match="no room"):
        shelf.put(range(100, 140))
    assert shelf.level.usage() == before
    assert len(shelf.level.entries()) == 1


def test_the_room_of_what_is_leaving_is_promised_to_others() -> None:
    shelf, below = Shelf(), Shelf(name="below")
    entry, other = shelf.put(range(8)), shelf.put(range(12))
    both = shelf.level.usage()
    below.level.adopt(entry, shelf.level)
    shelf.level.set_leaving(entry, True)
    assert shelf.level.usage().bytes == shelf.level.weigh([other])
    shelf.level.set_leaving(entry, False)
    assert shelf.level.usage() == both
    shelf.level.set_leaving(entry, True)
    shelf.level.remove(entry)
    assert shelf.level.usage().bytes == shelf.level.weigh([other])
    below.clock.wait_until(1e9)
    assert [(o.kind, o.entry) for o in below.level.poll()] == [("adopted", entry)]
