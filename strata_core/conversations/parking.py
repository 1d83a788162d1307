"""Putting away what leaves a slot, and following what levels do with it.

Where a conversation goes is decided by :func:`strata_core.conversations.placement.decide` (or a plugin before it): it
stays in RAM, and is mirrored below where that is asked for; or it only passes through RAM on its way to a level below;
or it is refused. What nothing takes is a counted discard, with its reason in the ledger.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from strata_core.clock import Clock
from strata_core.conversations.checkpoints import root_position
from strata_core.conversations.compaction import rewritten_by
from strata_core.conversations.ladder import Ladder
from strata_core.conversations.options import KeeperOptions
from strata_core.conversations.placement import Action, Placement, Verdict
from strata_core.errors import LevelError
from strata_core.events import ConversationParked, Event
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Outcome

log = logging.getLogger("strata.cache")

#: How often levels are asked what has been there for too long.
EXPIRY_S = 60.0
#: Asks the admission rules: kind of placement, bytes needed, bytes available.
Ask = Callable[[str, int, int | None], Verdict]
#: Told of an entry that no level holds any more: the entry, the place it left, the reason.
Lost = Callable[[Entry, str, str], None]


@attrs.define
class Parking:
    """Engine thread only.

    :ivar copies: whether keeping in RAM copies pages, because the engine's own are on a device.
    :ivar counts: ``discards``, ``compacted``.
    """

    ladder: Ladder
    options: KeeperOptions
    copies: bool
    available: Callable[[], int | None]
    ask: Ask
    lost: Lost
    emit: Callable[[Event], None]
    clock: Clock = attrs.field(factory=Clock)
    counts: Counter[str] = attrs.field(factory=Counter)
    _next_expiry: float = 0.0
    _mirrored: dict[str, float] = attrs.field(factory=dict)  # conversation -> when it was last written below RAM
    _waiting: dict[str, Entry] = attrs.field(factory=dict)  # conversation -> its newest state, to be written later

    # -- a conversation leaves its slot -------------------------------------------------------------------------

    def park(self, entry: Entry, pages: HeldPages) -> Level | None:
        """Keep an entry somewhere; the caller goes on holding ``pages``. None when it was discarded."""
        start = self.clock.monotonic()
        level, verdict = self._place(entry, pages)
        if level is None:
            self.discard(entry, "admission" if verdict.action is Action.REFUSE else "no level has room")
        elif level.rank == 0:
            self._after_storing(entry, level)
            self._mirror(entry, pages)
        self._report(entry, level, self.clock.monotonic() - start)
        return level

    def discard(self, entry: Entry, why: str) -> None:
        self.counts["discards"] += 1
        self.lost(entry, "live", f"discarded: {why}")

    def _place(self, entry: Entry, pages: HeldPages) -> tuple[Level | None, Verdict]:
        ladder, ram = self.ladder, self.ladder.ram
        need = self._cost(ram, entry) if ram is not None and self.copies else 0
        evicted = 0
        while True:
            available = self.available()
            verdict = self.ask("park", need, available)
            # Under pressure the conversation that was just used is worth more than those parked before it.
            if verdict.action is not Action.REFUSE or available is None or not ladder.shed():
                break
            evicted += 1
        if verdict.action is Action.REFUSE:
            log.info(
                "skip parking (physical RAM admission; %s; evicted %d, %d still parked)",
                verdict.reason, evicted, len(ladder.entries(ram)) if ram is not None else 0,
            )
            return None, verdict
        if verdict.action is Action.THROUGH:
            level = ladder.put(entry, pages, len(ladder.levels) - len(ladder.below))
            if level is not None:
                self._keep_root(entry, pages, level)
            # Asked to go to disk, which would not: RAM is better than nothing, where the floor holds.
            if level is not None or ram is None or self.options.target != "disk" or available is None:
                return level, verdict
            if available < need + self.options.parking_floor:
                return None, verdict
        return ladder.put(entry, pages), verdict

    def _mirror(self, entry: Entry, pages: HeldPages) -> None:
        if not self.options.mirror or not self.ladder.below:
            if self.ladder.roots is not None:
                self._keep_root(entry, pages, self.ladder.roots)
            return
        last = self._mirrored.get(entry.conversation)
        if last is not None and self.clock.monotonic() - last < self.options.throttle_s:
            self._waiting[entry.conversation] = entry
            return
        self._waiting.pop(entry.conversation, None)
        self._write(entry, pages)

    def _write(self, entry: Entry, pages: HeldPages) -> None:
        level = self.ladder.mirror(entry, pages)
        if level is not None:
            if self.options.throttle_s:
                self._mirrored[entry.conversation] = self.clock.monotonic()
            self._keep_root(entry, pages, level)

    def _keep_root(self, entry: Entry, pages: HeldPages, level: Level) -> None:
        """Keep the beginning of a conversation for its own sake: what its client says others share, or up to its second
        turn (the system prompt). On the level for system prompts, or where there is none, on the one that has the
        conversation.

        There it shares what the conversation has stored, so it costs its names only, until the conversation goes.
        """
        size = self.ladder.page_tokens
        # A root of a model with states ends at one of them, which is kept at the first long enough turn boundary.
        least = 0 if entry.states is None else self.options.checkpoints.root
        tokens = root_position(entry.turns[1:], size, least, entry.prefix) or 0
        if entry.states is not None and tokens not in entry.states:
            tokens = 0
        if self.options.roots == 0 or not tokens or entry.root:
            return
        level = self.ladder.roots or level
        with self.ladder.tolerating(level):
            address = entry.addresses[tokens // size - 1]
            roots = self._roots()
            for place, known in roots:
                if known.addresses[-1] == address and known.key == self.options.root_key:
                    place.update(attrs.evolve(known, used=entry.used))
                    return
            root = attrs.evolve(
                entry, id=uuid.uuid4().hex, conversation=address.hex(), tokens=entry.tokens[:tokens],
                addresses=entry.addresses[: tokens // size], turns=entry.turns[:1], reason="root", root=True,
                pinned=False, key=self.options.root_key,
                states=None if entry.states is None else tuple(p for p in entry.states if p <= tokens),
            )  # fmt: skip
            self._add_root(root, pages, level, roots)

    def _roots(self) -> list[tuple[Level, Entry]]:
        """What is kept as a root, the longest unused first, and where: it may have moved down since."""
        places = [self.ladder.roots] if self.ladder.roots is not None else self.ladder.below
        found = {e.id: (level, e) for level in places for e in self.ladder.entries(level) if e.root}
        return sorted(found.values(), key=lambda one: one[1].used)

    def _add_root(self, root: Entry, pages: HeldPages, level: Level, roots: list[tuple[Level, Entry]]) -> None:
        """:param roots: those that are there, the longest unused first; they go where there are too many."""
        limit, part = self.options.roots, pages.fork(len(root.tokens))
        number = self.ladder.searched.index(level)
        try:
            if self.ladder.put(root, part, number, number + 1) is not None:
                roots.append((level, root))
        finally:
            part.release()
        places = {place.name: place for place, _ in roots}.values()
        while roots:
            weight = sum(place.weigh([root for at, root in roots if at is place]) for place in places)
            if (limit is None or len(roots) <= limit) and weight <= self.options.root_bytes:
                break
            self.ladder.discard([roots.pop(0)[1]])

    def _report(self, entry: Entry, level: Level | None, elapsed: float) -> None:
        ram = self.ladder.ram
        usage = self.ladder.usage(ram) if ram is not None else None
        target = "discarded" if level is None else "ram" if level.rank == 0 else "disk"
        log.info(
            "parked %d tokens in %.1f ms (%s); parked=%d bytes=%d evictions=%d discards=%d",
            len(entry.tokens), 1e3 * elapsed, target, usage.entries if usage else 0, usage.bytes if usage else 0,
            self.ladder.counts["evictions"], self.counts["discards"],
        )
        if level is not None:
            self.emit(
                ConversationParked(
                    conversation=entry.conversation,
                    tokens=len(entry.tokens),
                    nbytes=self._weight(level, entry),
                    target=level.name,
                    seconds=elapsed,
                )
            )

    def _cost(self, level: Level, entry: Entry) -> int:
        with self.ladder.tolerating(level):
            return level.cost(entry)
        return 0

    def _weight(self, level: Level, entry: Entry) -> int:
        with self.ladder.tolerating(level):
            return level.weigh([entry])
        return 0

    # -- between steps ------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Write what the throttle held back and is due, and follow what levels have completed."""
        now = self.clock.monotonic()
        due = [e for c, e in self._waiting.items() if now - self._mirrored.get(c, 0.0) >= self.options.throttle_s]
        for entry in due:
            self.write_now(entry)
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRY_S
            self._mirrored = {c: at for c, at in self._mirrored.items() if now - at < self.options.throttle_s}
            self.ladder.expire(self.clock.time())
        for level, outcome in self.ladder.poll():
            if outcome.kind == "stored":
                log.info(
                    "spilled %d tokens (%d MiB, %d new segments)",
                    len(outcome.entry.tokens), outcome.nbytes >> 20, outcome.parts,
                )
                if not outcome.entry.root:
                    self._after_storing(outcome.entry, level)
            elif outcome.kind == "failed":
                self._rescue(level, outcome)

    def write_now(self, entry: Entry) -> None:
        """Write an entry of RAM below, if RAM still has it and nothing below does."""
        self._waiting.pop(entry.conversation, None)
        ram = self.ladder.ram
        if ram is not None and self.ladder.holds(ram, entry):
            pages = self.ladder.held(ram, entry)
            if pages is not None:
                self._write(entry, pages)

    def write_all(self) -> None:
        """Put everything where it outlasts the process, and return when it is durable.

        :raises LevelError: some of it is not.
        """
        self._waiting.clear()
        self.ladder.lower_all()
        self.ladder.flush()
        self.poll()

    def waiting(self) -> bool:
        """Whether a write is held back by the throttle."""
        return bool(self._waiting)

    def _after_storing(self, entry: Entry, level: Level) -> None:
        """A newer state of a conversation is safe: older copies that it replaces go."""
        dropped = self.ladder.supersede(entry, level)
        if dropped:
            log.info("dropped %d superseded", dropped)
        found = rewritten_by(entry, self._copies_of(entry), self.options.divergence)
        if found.doubt:
            log.info("discarded 0 compacted (%s)", found.doubt)
        gone = self.ladder.discard([e for e in found.rewritten if e.used <= entry.created], "compacted")
        if gone:
            self.counts["compacted"] += gone
            log.info("discarded %d compacted", gone)

    def _copies_of(self, entry: Entry) -> Sequence[Entry]:
        return [other for _, other in self.ladder.copies(entry.conversation) if other.id != entry.id]

    def _rescue(self, level: Level, outcome: Outcome) -> None:
        """A level could not write an entry after all: keep it elsewhere, or count what is lost."""
        entry, pages = outcome.entry, outcome.pages
        if pages is None:
            return
        if entry.root:  # its conversation is kept, or will be rescued, by itself
            pages.release()
            return
        try:
            if any(self.ladder.holds(other, entry) for other in self.ladder.levels):
                return
            if self.ladder.put(entry, pages, self.ladder.levels.index(level) + 1) is not None:
                return
            available = self.available()
            floor = available is not None and available >= self.options.parking_floor
            ram = self.ladder.put(entry, pages, 0, 1) if self.ladder.ram is not None and floor else None
            if ram is not None:
                self._after_storing(entry, ram)
                return
            self.discard(entry, f"level {level.name} failed")
        except LevelError as error:
            self.discard(entry, str(error))
        finally:
            pages.release()


def placement(options: KeeperOptions, kind: str, need: int, available: int | None, lower: bool) -> Placement:
    """The question that a placement asks of the admission rules."""
    return Placement(
        kind=kind,
        need=need,
        available=available,
        parking_floor=options.parking_floor,
        transient_floor=options.transient_floor,
        target=options.target if kind == "park" else "ram",
        lower=lower,
    )
