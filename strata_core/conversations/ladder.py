"""The levels in order, and what moves between them: insertion, eviction, demotion.

One rule for every level: to take an entry in, the oldest entries that nobody protects leave until it fits, each offered
to the next level down (a demotion) or, where none takes it, dropped (an eviction). An entry that could not fit even
then is refused before anything leaves. The entry being taken in is no candidate in its own pass.

A level that fails costs what it could have given, not the request: it is reported and gone around.

A level for system prompts only is asked after all others and takes no part in moves; the archive is asked never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from strata_core.clock import Clock
from strata_core.conversations.archiving import Archiving
from strata_core.conversations.index import Query
from strata_core.conversations.tolerance import Tolerance, Trouble
from strata_core.errors import CannotAdopt, LevelError
from strata_core.pool.table import HeldPages
from strata_core.store.base import Archive, Entry, Level, Outcome, Store, Usage

#: Called with an entry that has left a level, the level's name, the reason, and the name of the level below that has it
#: now, or None when nothing has.
Left = Callable[[Entry, str, str, str | None], None]

#: Why an entry leaves whose time is over.
AGE = "evicted: age"

#: What is counted for each level: entries taken from slots or from the level above (their tokens, and bytes written),
#: restores (and their tokens), moves down from the level above and to the one below, entries dropped for room or age,
#: and writes that failed.
FLOW = (
    "stored", "stored_tokens", "stored_bytes", "restored", "restored_tokens", "demoted_in", "demoted_out", "evicted",
    "failed",
)  # fmt: skip


@attrs.frozen(eq=False)
class Found:
    """A stored entry that shares ``shared`` tokens with a prompt."""

    level: Level
    entry: Entry
    shared: int


def victims(entries: Sequence[Entry], protected: frozenset[str]) -> list[Entry]:
    """Entries that may leave, in the order in which they do: least recently used first, what is kept as the root of
    conversations after all of these. Pure."""
    return sorted((e for e in entries if not e.pinned and e.id not in protected), key=lambda e: (e.root, e.used))


def over(usage: Usage, cost: int) -> bool:
    """Whether one more entry that costs ``cost`` bytes exceeds a bound. Pure."""
    if usage.max_bytes is not None and usage.bytes + cost > usage.max_bytes:
        return True
    return usage.max_entries is not None and usage.entries + 1 > usage.max_entries


def replaces(newer: Entry, entry: Entry) -> bool:
    """Whether ``newer``, of whose tokens those of ``entry`` are a beginning, can be resumed where ``entry`` can: it has
    to hold the state at its deepest position. Pure."""
    return newer.states is None or not entry.states or entry.states[-1] in newer.states


class Ladder(Tolerance):
    """All levels, best rank first.

    :ivar levels: those of the cascade. :ivar roots: the level for system prompts, where they have one of their own.
    :ivar searched: all of these, in the order in which they are asked.
    :ivar counts: ``evictions``, ``demotions``, ``superseded``, ``archived``, ``archive_failures``, and of levels below
        RAM ``disk_evictions``, ``age_evictions``, ``spilled`` (entries written), ``spilled_tokens``,
        ``spilled_bytes``, ``spill_failures``.
    :ivar flow: by level's name, what went in and out of it since the start, see :data:`FLOW`.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        left: Left,
        trouble: Trouble,
        page_tokens: int = 32,
        clock: Clock | None = None,
        archive: Archive | None = None,
    ):
        super().__init__(trouble)
        self.page_tokens = page_tokens
        self._clock = clock or Clock()
        self.levels = sorted((level for level in levels if not level.for_roots), key=lambda level: level.rank)
        self.roots = next((level for level in levels if level.for_roots), None)
        self.searched = [*self.levels, *([self.roots] if self.roots is not None else [])]
        self.counts: Counter[str] = Counter()
        self.archiving = Archiving(archive, trouble, self.counts)
        self.flow: dict[str, Counter[str]] = {level.name: Counter() for level in levels}
        self._left = left
        self._guards: Counter[str] = Counter()
        self._outcomes: list[tuple[Level, Outcome]] = []  # of work that was complete at once
        self._moving: dict[str, tuple[Level, str]] = {}  # entry id -> the level it is leaving, and why
        self._arrived: dict[str, tuple[Level, Entry]] = {}  # of these, what is complete on the level it goes to

    @property
    def ram(self) -> Level | None:
        """The level in memory, where there is one."""
        return self.levels[0] if self.levels and self.levels[0].rank == 0 else None

    @property
    def below(self) -> list[Level]:
        """The levels below RAM, best first."""
        return [level for level in self.levels if level.rank > 0]

    @property
    def stores(self) -> list[Store]:
        """Everything that keeps something: levels, and the archive."""
        archive = self.archiving.archive
        return [*self.searched, *([archive] if archive is not None else [])]

    #: Brings an entry's pages into memory at once, held for the caller; raises LevelError or OutOfMemory.
    fetch: Callable[[Found], HeldPages] | None = None

    def guard(self, entry: Entry) -> None:
        """Keep an entry from leaving, from the lookup that chose it until :meth:`unguard`."""
        self._guards[entry.id] += 1

    def unguard(self, entry: Entry) -> None:
        self._guards[entry.id] -= 1
        if not self._guards[entry.id]:
            del self._guards[entry.id]

    def find(
        self, query: Query, excluded: frozenset[str] = frozenset(), without: frozenset[str] = frozenset()
    ) -> Found | None:
        """The entry that shares most; a lower level only where it shares strictly more, ties to the latest used.

        :param excluded: ids of entries that could not be restored just now.
        :param without: names of levels that are not asked.
        """
        best: Found | None = None
        for level in (level for level in self.searched if level.name not in without):
            candidates: list[tuple[Entry, int]] = []
            with self.tolerating(level):
                candidates = level.find(query, excluded)
            if not candidates:
                continue
            most = candidates[0][1]
            if best is None or most > best.shared:
                entry = max((e for e, shared in candidates if shared == most), key=lambda e: (not e.root, e.used))
                best = Found(level, entry, most)
        return best

    def put(self, entry: Entry, pages: HeldPages, first: int = 0, stop: int | None = None) -> Level | None:
        """Keep an entry on level number ``first`` or the next below that takes it, before number ``stop``; None when
        none does.

        The level for system prompts has the number behind the last one's, and is not tried unless asked for."""
        for number in range(first, len(self.levels) if stop is None else stop):
            level = self.searched[number]
            with self.tolerating(level):
                if self._make_room(number, entry):
                    outcome = level.put(entry, pages)
                    if outcome is not None and level.rank > 0:
                        self._outcomes.append((level, outcome))
                    elif outcome is not None:
                        self._count_stored(level, outcome)
                    return level
        return None

    def mirror(self, entry: Entry, pages: HeldPages) -> Level | None:
        """Keep a copy of an entry below RAM too, where none is yet."""
        if not self.below or any(self.holds(level, entry) for level in self.below):
            return None
        return self.put(entry, pages, len(self.levels) - len(self.below))

    def supersede(self, newer: Entry, holder: Level) -> int:
        """Drop unpinned entries whose tokens are a beginning of ``newer``'s, which ``holder`` has taken: it can resume
        wherever they could. Copies below ``holder`` stay until the newer one comes there, as they may outlast it."""
        return self._supersede(newer, [level for level in self.levels if level.rank <= holder.rank])

    def _supersede(self, newer: Entry, levels: Sequence[Level]) -> int:
        dropped = 0
        for level in levels:
            with self.tolerating(level):
                for entry in victims(level.beginnings(newer), self._protected(newer)):
                    if not entry.root and replaces(newer, entry):
                        self._retire(entry, level, "superseded")
                        dropped += 1
        self.counts["superseded"] += dropped
        return dropped

    def discard(self, entries: Sequence[Entry], archived_as: str = "") -> int:
        """Drop entries wherever they are; returns how many were.

        :param archived_as: why, for the archive, where they shall go there.
        """
        dropped = 0
        for level in self.searched:
            with self.tolerating(level):
                for entry in entries:
                    if entry.id not in self._guards and entry.id not in self._moving and level.holds(entry.id):
                        self._retire(entry, level, archived_as)
                        dropped += 1
        return dropped

    def _retire(self, entry: Entry, level: Level, why: str) -> None:
        """Drop an entry for good; the last copy of it goes to the archive first, if ``why`` says as what."""
        others = (other for other in self.searched if other is not level)
        if why and self.archiving.archive is not None and not any(self.holds(other, entry) for other in others):
            self.archiving.offer(entry, why, level)
        level.remove(entry)

    def shed(self) -> bool:
        """Let the oldest entry in RAM go, to get back the memory it holds. False when none can go."""
        if not self.levels or self.levels[0].rank != 0:
            return False
        with self.tolerating(self.levels[0]):
            leaving = victims(list(self.levels[0].entries()), frozenset(self._guards))
            return bool(leaving) and self._degrade(0, leaving[0], "evicted: memory")
        return False

    def lower_all(self) -> None:
        """Put what is only in RAM on a level below too, the latest used last, so that it is there after a restart. What
        no level below takes stays in RAM alone."""
        ram = self.ram
        if ram is None or not self.below:
            return
        for entry in sorted(ram.entries(), key=lambda entry: entry.used):
            with self.tolerating(ram):
                pages = ram.held(entry)
                if pages is not None:
                    self.mirror(entry, pages)

    def touch(self, found: Found) -> None:
        """Note that an entry is used now, so that it is the last to leave."""
        with self.tolerating(found.level):
            found.level.update(attrs.evolve(found.entry, used=self._clock.time()))

    def copies(self, conversation: str) -> list[tuple[Level, Entry]]:
        """All stored copies of a conversation."""
        return [(lv, e) for lv in self.searched for e in self.entries(lv) if e.conversation == conversation]

    def busy(self) -> bool:
        """Whether there is background work that :meth:`poll` must finish."""
        return bool(self._arrived) or any(self.busy_level(store) for store in self.stores)

    def poll(self) -> list[tuple[Level, Outcome]]:
        """Let levels finish background work, complete the moves that it was for, and hand on what it came to."""
        self.archiving.poll()
        for level in self.searched:
            with self.tolerating(level):
                self._outcomes += [(level, outcome) for outcome in level.poll()]
        outcomes, self._outcomes = self._outcomes, []
        for level, outcome in outcomes:
            self._complete(level, outcome)
        self._finish_moves()
        return outcomes

    def _complete(self, level: Level, outcome: Outcome) -> None:
        entry = outcome.entry
        if outcome.kind == "stored":
            self._count_stored(level, outcome)
            self.counts["spilled"] += 1
            self.counts["spilled_tokens"] += len(entry.tokens)
            self.counts["spilled_bytes"] += outcome.nbytes
        elif outcome.kind == "failed":
            self.counts["spill_failures"] += 1
            self.flow[level.name]["failed"] += 1
            self._trouble(level.name, LevelError(outcome.error))
        if entry.id not in self._moving:
            return
        if outcome.kind != "failed":
            self._arrived[entry.id] = (level, entry)
            return
        source, _ = self._moving.pop(entry.id)
        with self.tolerating(source):
            source.set_leaving(entry, False)

    def _finish_moves(self) -> None:
        """What is complete below leaves the level above, but for what is guarded: somebody is about to read it there,
        and would be told that it is gone."""
        for entry_id, (target, entry) in list(self._arrived.items()):
            if entry_id in self._guards:
                continue
            del self._arrived[entry_id]
            source, reason = self._moving.pop(entry_id)
            if not self.holds(source, entry):
                continue  # deleted meanwhile
            with self.tolerating(source):
                if self.holds(target, entry):
                    source.remove(entry)
                    self._moved(entry, source, target, reason)
                else:
                    source.set_leaving(entry, False)

    def count_restored(self, level: Level, tokens: int) -> None:
        """Note that pages of so many positions came back from a level."""
        flow = self.flow[level.name]
        flow["restored"] += 1
        flow["restored_tokens"] += tokens

    def _count_stored(self, level: Level, outcome: Outcome) -> None:
        flow = self.flow[level.name]
        flow["stored"] += 1
        flow["stored_tokens"] += len(outcome.entry.tokens)
        flow["stored_bytes"] += outcome.nbytes

    def flush(self) -> None:
        """Return when what was put below RAM is durable.

        :raises LevelError: some of it is not.
        """
        for store in self.stores:
            store.flush()

    def expire(self, now: float) -> None:
        """Let go what levels hold for longer than they shall: down, or from the last level for good.

        :param now: seconds since the epoch.
        """
        self.archiving.expire(now)
        for number, level in enumerate(self.searched):
            with self.tolerating(level):
                protected = frozenset(self._guards) | frozenset(self._moving)
                for entry in victims(level.expired(now), protected):
                    self._degrade(number, entry, AGE)

    def settle(self) -> bool:
        """Wait for background work, so that it gives back the engine's pages. False when there was none."""
        working = [store for store in self.stores if self.busy_level(store)]
        for store in working:
            with self.tolerating(store):
                store.settle()
        return bool(working)

    def close(self) -> None:
        for store in self.stores:
            with self.tolerating(store):
                store.close()

    # -- moving down --------------------------------------------------------------------------------------------

    def _protected(self, entry: Entry) -> frozenset[str]:
        return frozenset(self._guards) | frozenset(self._moving) | {entry.id}

    def _make_room(self, number: int, entry: Entry) -> bool:
        level = self.searched[number]
        protected = self._protected(entry)
        if not self._could_fit(level, entry, protected):
            return False
        usage, cost = level.usage(), level.cost(entry)
        if usage.max_bytes is not None and usage.bytes + cost > usage.max_bytes:
            level.reclaim(usage.bytes + cost - usage.max_bytes)
        while over(level.usage(), level.cost(entry)):
            if level.when_full == "reject":
                return False
            leaving = victims(list(level.entries()), protected)
            if not leaving or not self._degrade(number, leaving[0], "evicted: budget"):
                return False
            protected |= {leaving[0].id}
        return True

    def _could_fit(self, level: Level, entry: Entry, protected: frozenset[str]) -> bool:
        """Whether the entry fits once everything that may leave has left."""
        usage = level.usage()
        staying = [e for e in level.entries() if (e.pinned or e.id in protected) and e.id not in self._moving]
        if usage.max_entries is not None and len(staying) + 1 > usage.max_entries:
            return False
        return usage.max_bytes is None or level.weigh([*staying, entry]) <= usage.max_bytes

    def _degrade(self, number: int, entry: Entry, reason: str) -> bool:
        """Let an entry leave a level: to one below that has it or takes it, else, from RAM and from the last level, for
        good. False when it stays: only the last level deletes."""
        level = self.searched[number]
        lower = self.levels[number + 1 :]
        has = next((below for below in lower if self.holds(below, entry)), None)
        if has is not None:
            level.remove(entry)
            self._moved(entry, level, has, reason)
            return True
        pages = level.held(entry)
        if pages is not None:
            below = self.put(entry, pages, number + 1)
            level.remove(entry)
            if below is not None:
                self._moved(entry, level, below, reason)
                return True
        elif lower:
            return self._begin_move(number, entry, reason)
        else:
            level.remove(entry)
        kind = "age_evictions" if reason == AGE else "evictions" if level.rank == 0 else "disk_evictions"
        self.counts[kind] += 1
        self.flow[level.name]["evicted"] += 1
        self._left(entry, level.name, reason, None)
        return True

    def _begin_move(self, number: int, entry: Entry, reason: str) -> bool:
        source = self.levels[number]
        for place in range(number + 1, len(self.levels)):
            target = self.levels[place]
            with self.tolerating(target):
                if not self._make_room(place, entry):
                    continue
                try:
                    target.adopt(entry, source)
                except CannotAdopt:
                    return self._carry(number, entry, reason)
                source.set_leaving(entry, True)
                self._moving[entry.id] = (source, reason)
                return True
        return False

    def _carry(self, number: int, entry: Entry, reason: str) -> bool:
        """Move an entry down through fresh pages, for levels that share no other way."""
        source = self.levels[number]
        if self.fetch is None:
            return False
        pages = self.fetch(Found(source, entry, len(entry.tokens)))
        try:
            below = self.put(entry, pages, number + 1)
        finally:
            pages.release()
        if below is not None:
            source.remove(entry)
            self._moved(entry, source, below, reason)
        return below is not None

    def _moved(self, entry: Entry, source: Level, target: Level, reason: str) -> None:
        self.counts["demotions"] += 1
        self.flow[source.name]["demoted_out"] += 1
        self.flow[target.name]["demoted_in"] += 1
        self._supersede(entry, [target])
        self._left(entry, source.name, reason, target.name)
