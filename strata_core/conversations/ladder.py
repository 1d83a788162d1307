"""The levels in order, and what moves between them: insertion, eviction, demotion.

One rule for every level: to take an entry in, the oldest entries that nobody protects leave until it fits, each offered
to the next level down (a demotion) or, where none takes it, dropped (an eviction). An entry that could not fit even
then is refused before anything leaves. The entry being taken in is no candidate in its own pass.

A level that fails costs what it could have given, not the request: it is reported and gone around.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np

from strata_core.conversations.index import Query
from strata_core.errors import LevelError
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Usage

log = logging.getLogger("strata.cache")

#: Called with an entry that has left a level, the level's name, the reason, and the name of the level below that has it
#: now, or None when nothing has.
Left = Callable[[Entry, str, str, str | None], None]
#: Called with a level's name and the error it met.
Trouble = Callable[[str, Exception], None]


@attrs.frozen(eq=False)
class Found:
    """A stored entry that shares ``shared`` tokens with a prompt."""

    level: Level
    entry: Entry
    shared: int


def victims(entries: Sequence[Entry], protected: frozenset[str]) -> list[Entry]:
    """Entries that may leave, in the order in which they do: least recently used first. Pure."""
    return sorted((e for e in entries if not e.pinned and e.id not in protected), key=lambda e: e.used)


def over(usage: Usage, cost: int) -> bool:
    """Whether one more entry that costs ``cost`` bytes exceeds a bound. Pure."""
    if usage.max_bytes is not None and usage.bytes + cost > usage.max_bytes:
        return True
    return usage.max_entries is not None and usage.entries + 1 > usage.max_entries


class Ladder:
    """All levels, best rank first.

    :ivar counts: ``evictions``, ``demotions``, ``superseded``.
    """

    def __init__(self, levels: Sequence[Level], left: Left, trouble: Trouble):
        self.levels = sorted(levels, key=lambda level: level.rank)
        self.counts: Counter[str] = Counter()
        self._left = left
        self._trouble = trouble
        self._guards: Counter[str] = Counter()

    def guard(self, entry: Entry) -> None:
        """Keep an entry from leaving, from the lookup that chose it until :meth:`unguard`."""
        self._guards[entry.id] += 1

    def unguard(self, entry: Entry) -> None:
        self._guards[entry.id] -= 1
        if not self._guards[entry.id]:
            del self._guards[entry.id]

    def find(self, query: Query, excluded: frozenset[str] = frozenset()) -> Found | None:
        """The entry that shares most; a lower level only where it shares strictly more, ties to the latest used.

        :param excluded: ids of entries that could not be restored just now.
        """
        best: Found | None = None
        for level in self.levels:
            candidates: list[tuple[Entry, int]] = []
            with self._tolerating(level):
                candidates = level.find(query, excluded)
            if not candidates:
                continue
            most = candidates[0][1]
            if best is None or most > best.shared:
                entry = max((e for e, shared in candidates if shared == most), key=lambda e: e.used)
                best = Found(level, entry, most)
        return best

    def put(self, entry: Entry, pages: HeldPages, first: int = 0) -> Level | None:
        """Keep an entry on level number ``first`` or the next below that takes it; None when none does."""
        for number in range(first, len(self.levels)):
            level = self.levels[number]
            with self._tolerating(level):
                if self._make_room(number, entry):
                    level.put(entry, pages)
                    return level
        return None

    def supersede(self, newer: Entry, holder: Level) -> int:
        """Drop unpinned entries whose tokens are a beginning of ``newer``'s, which ``holder`` has taken: it can resume
        wherever they could. Copies below ``holder`` stay until the newer one comes there, as they may outlast it."""
        return self._supersede(newer, [level for level in self.levels if level.rank <= holder.rank])

    def _supersede(self, newer: Entry, levels: Sequence[Level]) -> int:
        dropped = 0
        for level in levels:
            with self._tolerating(level):
                for entry in victims(list(level.entries()), frozenset(self._guards) | {newer.id}):
                    if (
                        entry.identity == newer.identity
                        and len(entry.tokens) <= len(newer.tokens)
                        and np.array_equal(entry.tokens, newer.tokens[: len(entry.tokens)])
                    ):
                        level.remove(entry)
                        dropped += 1
        self.counts["superseded"] += dropped
        return dropped

    def shed(self) -> bool:
        """Let the oldest entry in RAM go, to get back the memory it holds. False when none can go."""
        if not self.levels or self.levels[0].rank != 0:
            return False
        with self._tolerating(self.levels[0]):
            leaving = victims(list(self.levels[0].entries()), frozenset(self._guards))
            if leaving:
                self._degrade(0, leaving[0], "evicted: memory")
                return True
        return False

    def copies(self, conversation: str) -> list[tuple[Level, Entry]]:
        """All stored copies of a conversation."""
        return [(lv, e) for lv in self.levels for e in lv.entries() if e.conversation == conversation]

    def busy(self) -> bool:
        """Whether a level has background work that :meth:`poll` must finish."""
        return any(level.busy() for level in self.levels)

    def poll(self) -> None:
        for level in self.levels:
            with self._tolerating(level):
                level.poll()

    def settle(self) -> bool:
        """Wait for background work, so that it gives back the engine's pages. False when there was none."""
        working = [level for level in self.levels if level.busy()]
        for level in working:
            with self._tolerating(level):
                level.settle()
        return bool(working)

    def close(self) -> None:
        for level in self.levels:
            with self._tolerating(level):
                level.close()

    @contextmanager
    def _tolerating(self, level: Level) -> Iterator[None]:
        """Whatever the level raises within is reported, and goes no further."""
        try:
            yield
        except LevelError as error:
            self._trouble(level.name, error)
        except Exception as error:
            # Not what the contract allows. Levels come from plugins, and a fault of theirs must not end requests.
            log.exception("level %s failed", level.name)
            self._trouble(level.name, error)

    def _make_room(self, number: int, entry: Entry) -> bool:
        level = self.levels[number]
        protected = frozenset(self._guards) | {entry.id}
        if not self._could_fit(level, entry, protected):
            return False
        while over(level.usage(), level.cost(entry)):
            leaving = victims(list(level.entries()), protected)
            if not leaving:
                return False
            self._degrade(number, leaving[0], "evicted: budget")
        return True

    def _could_fit(self, level: Level, entry: Entry, protected: frozenset[str]) -> bool:
        """Whether the entry fits once everything that may leave has left."""
        usage = level.usage()
        staying = [e for e in level.entries() if e.pinned or e.id in protected]
        if usage.max_entries is not None and len(staying) + 1 > usage.max_entries:
            return False
        return usage.max_bytes is None or level.weigh([*staying, entry]) <= usage.max_bytes

    def _degrade(self, number: int, entry: Entry, reason: str) -> None:
        level = self.levels[number]
        pages = level.held(entry)
        below = self.put(entry, pages, number + 1) if pages is not None else None
        level.remove(entry)
        if below is not None:
            self.counts["demotions"] += 1
            self._supersede(entry, [below])
        else:
            self.counts["evictions"] += 1
        self._left(entry, level.name, reason, below.name if below is not None else None)
