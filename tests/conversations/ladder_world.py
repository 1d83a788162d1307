"""Levels in memory to build ladders of, with room for a number of equal entries."""

from __future__ import annotations

import attrs
import numpy as np

from strata_core.conversations.ladder import Ladder
from strata_core.pool.pool import PagePool
from strata_core.store.base import Entry, Level
from strata_core.store.ram import RamLevel
from strata_core.testing.scene import LAYOUTS, Scene, numpy_store


class Shelf(RamLevel):
    """A level below RAM: it copies what it is given to pages of its own."""

    def __init__(self, scene: Scene, max_bytes: int, name: str = "shelf", rank: int = 10):
        pools = [PagePool(numpy_store(pool.layout), 1 << 12) for pool in scene.pools]
        super().__init__(pools, copies=True, max_bytes=max_bytes, max_entries=1 << 12)
        self.name = name
        self.rank = rank


def tokens(number: int, count: int = 10) -> np.ndarray:
    """Ids that share nothing with those of another number."""
    return np.arange(1000 * number, 1000 * number + count, dtype=np.int32)


def room(scene: Scene, entries: float, count: int = 10) -> int:
    """Bytes that hold so many entries of ``count`` tokens."""
    probe = RamLevel(scene.pools, copies=False, max_bytes=0, max_entries=0)
    return int(probe.cost(scene.entry(tokens(0, count))) * entries)


@attrs.define(eq=False)
class World:
    """A ladder and what it reported.

    :ivar left: (tokens' first id // 1000, level, reason, moved to) of every entry that left a level.
    """

    scene: Scene
    ladder: Ladder
    left: list[tuple[int, str, str, str | None]]
    troubles: list[tuple[str, Exception]]

    @classmethod
    def build(cls, *levels: Level, scene: Scene) -> World:
        left: list[tuple[int, str, str, str | None]] = []
        troubles: list[tuple[str, Exception]] = []

        def on_left(entry: Entry, level: str, reason: str, moved_to: str | None) -> None:
            left.append((number_of(entry), level, reason, moved_to))

        ladder = Ladder(levels, on_left, lambda level, error: troubles.append((level, error)))
        return cls(scene, ladder, left, troubles)

    def put(self, number: int, count: int = 10, first: int = 0, **fields: object) -> Level | None:
        """Put an entry of tokens of this number in; the level that took it."""
        entry = self.scene.entry(tokens(number, count), **fields)  # type: ignore[arg-type]
        pages = self.scene.pages(entry)
        level = self.ladder.put(entry, pages, first)
        pages.release()
        return level

    def entry(self, number: int) -> Entry:
        [entry] = [e for level in self.ladder.levels for e in level.entries() if number_of(e) == number]
        return entry

    def kept(self, level: int = 0) -> list[int]:
        """Numbers of the entries on a level, ascending."""
        return sorted(number_of(entry) for entry in self.ladder.levels[level].entries())

    def close(self) -> None:
        self.ladder.close()
        assert self.scene.used == 0


def number_of(entry: Entry) -> int:
    return int(entry.tokens[0]) // 1000


def new_scene() -> Scene:
    return Scene.build(LAYOUTS["one layout"])
