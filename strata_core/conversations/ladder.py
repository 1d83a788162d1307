"""The levels in order, and what moves between them: insertion, eviction, demotion.

One rule for every level: to take an entry in, the oldest entries that nobody protects leave until it fits, each offered
to the next level down (a demotion) or, where none takes it, dropped (an eviction). An entry that could not fit even
then is refused before anything leaves. The entry being taken in is no candidate in its own pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from strata_core.conversations.index import Query
from strata_core.errors import LevelError
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Usage

#: Called with an entry that no level holds any more, and the reason.
Dropped = Callable[[Entry, str], None]
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

    def __init__(self, levels: Sequence[Level], dropped: Dropped, trouble: Trouble):
        self.levels = sorted(levels, key=lambda level: level.rank)
        self.counts: Counter[str] = Counter()
        self._dropped = dropped
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
            try:
                candidates = [c for c in level.find(query) if c[0].id not in excluded]
            except LevelError as error:
                self._trouble(level.name, error)
                continue
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
            try:
                if self._make_room(number, entry):
                    level.put(entry, pages)
                    return level
            except LevelError as error:
                self._trouble(level.name, error)
        return None

    def supersede(self, newer: Entry) -> int:
        """Drop unpinned entries whose tokens are a beginning of ``newer``'s, which was put before: it can resume
        wherever they could."""
        dropped = 0
        for level in self.levels:
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
        """Let the oldest entry of the first level go, to get back the memory it holds. False when none can go."""
        if not self.levels:
            return False
        leaving = victims(list(self.levels[0].entries()), frozenset(self._guards))
        if leaving:
            self._degrade(0, leaving[0], "evicted: memory")
        return bool(leaving)

    def copies(self, conversation: str) -> list[tuple[Level, Entry]]:
        """All stored copies of a conversation."""
        return [(lv, e) for lv in self.levels for e in lv.entries() if e.conversation == conversation]

    def busy(self) -> bool:
        """Whether a level has background work that :meth:`poll` must finish."""
        return any(level.busy() for level in self.levels)

    def poll(self) -> None:
        for level in self.levels:
            level.poll()

    def close(self) -> None:
        for level in self.levels:
            level.close()

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
        else:
            self.counts["evictions"] += 1
            self._dropped(entry, reason)
