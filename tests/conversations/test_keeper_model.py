"""Pages, index, RAM, a level below and the keeper together, against a plain model of what each sequence holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ladder_world import Shelf, room

from strata_core.compute.base import PageStore
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate
from strata_core.conversations.options import KeeperOptions
from strata_core.conversations.placement import decide
from strata_core.errors import OutOfMemory
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry
from strata_core.store.ram import RamLevel
from strata_core.testing.scene import LAYOUTS, PAGE_TOKENS, Scene, numpy_store
from strata_core.testing.shadow import ShadowBackend

PARKING, TRANSIENT, PLENTY = 1000, 100, 1 << 40
TENANTS = ("", "other")
MAX_TOKENS = 40
SLOTS = st.integers(0, 2)
#: Bytes of a page that stand for one position.
MARK = 8


def mark(tokens: Sequence[int]) -> bytes:
    """What the last position of a sequence holds: it depends on all ids before it, as K/V do."""
    return blake3(np.array(tokens, np.int32).tobytes()).digest(length=MARK)


def shadow_store() -> Callable[[PageLayout], PageStore]:
    device = ShadowBackend(seed=5)
    return lambda layout: device.page_store(layout, 8, PortableArena("off"))


@attrs.define(eq=False)
class Parts:
    scene: Scene
    host: list[PagePool]
    ram: RamLevel
    shelf: Shelf


class Conversations(RuleBasedStateMachine):
    """Three slots, room for about four conversations in RAM and three below. Ids are 0 and 1, so that prefixes meet."""

    copies = False

    def __init__(self) -> None:
        super().__init__()
        make_store = shadow_store() if self.copies else numpy_store
        scene = Scene.build(LAYOUTS["two layouts"], make_store, max_pages=100)
        host = [PagePool(numpy_store(pool.layout), 100) for pool in scene.pools] if self.copies else []
        pools = host or scene.pools
        ram = RamLevel(pools, copies=self.copies, max_bytes=room(scene, 4, 16), max_entries=6)
        self.parts = Parts(scene, host, ram, Shelf(scene, room(scene, 3, 16)))
        self.available: int | None = PLENTY
        self.keeper = Keeper(
            scene.identity,
            scene.pools,
            [ram, self.parts.shelf],
            KeeperOptions(parking_floor=PARKING, transient_floor=TRANSIENT, mirror=False, weigh_restores=False),
            openers=frozenset(),
            copies=self.copies,
            max_context=MAX_TOKENS,
            spell=lambda token: None,
            available=lambda: self.available,
            admit=decide,
            emit=lambda event: None,
        )
        self.slots: list[Live | None] = [None, None, None]
        self.pinned: set[str] = set()

    # -- what clients and the machine do ------------------------------------------------------------------------

    @rule(slot=SLOTS, ids=st.lists(st.integers(0, 1), min_size=1, max_size=18), tenant=st.sampled_from(TENANTS))
    def ask(self, slot: int, ids: list[int], tenant: str) -> None:
        self.serve(slot, ids, tenant)

    @rule(slot=SLOTS, source=st.integers(0, 9), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def continue_something(self, slot: int, source: int, more: list[int]) -> None:
        known = self.sequences()
        if known:
            ids, tenant = known[source % len(known)]
            self.serve(slot, [*ids, *more][:MAX_TOKENS], tenant)

    @rule(slot=SLOTS)
    def park(self, slot: int) -> None:
        self.clear(slot, "switch")

    @rule(slot=SLOTS, rest=st.integers(0, 3), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def cancel_and_go_on(self, slot: int, rest: int, more: list[int]) -> None:
        """A request ends early: what stays is what was computed up to a complete page. Another goes on from there."""
        live = self.slots[slot]
        if live is not None:
            pages = max(0, len(live.tokens) // PAGE_TOKENS - rest)
            live.addresses()
            live.truncate(pages * PAGE_TOKENS)
            self.compute(live, more[: MAX_TOKENS - len(live.tokens)])

    @precondition(lambda self: self.stored())
    @rule(which=st.integers(0, 9))
    def pin_or_unpin(self, which: int) -> None:
        entry = self.stored()[which % len(self.stored())]
        pin = entry.id not in self.pinned
        for level, copy in self.keeper.ladder.copies(entry.conversation):
            level.update(attrs.evolve(copy, pinned=pin))
            (self.pinned.add if pin else self.pinned.discard)(copy.id)

    @precondition(lambda self: self.stored())
    @rule(which=st.integers(0, 9))
    def delete(self, which: int) -> None:
        entry = self.stored()[which % len(self.stored())]
        for level, copy in self.keeper.ladder.copies(entry.conversation):
            level.remove(copy)
            self.pinned.discard(copy.id)

    @rule(available=st.sampled_from([PLENTY, PLENTY, PLENTY, PARKING - 1, 0, None]))
    def memory_changes(self, available: int | None) -> None:
        self.available = available

    @rule()
    def poll(self) -> None:
        self.keeper.poll()

    @precondition(lambda self: self.stored())
    @rule(which=st.integers(0, 9), part=st.integers(1, MAX_TOKENS))
    def look_into(self, which: int, part: int) -> None:
        """Any stored entry can be read, as far as memory for it is there."""
        entry = self.stored()[which % len(self.stored())]
        [level] = [level for level in self.keeper.ladder.levels if any(e.id == entry.id for e in level.entries())]
        tokens = min(part, len(entry.tokens))
        try:
            pages = self.parts.scene.restore(level, entry, tokens)
        except OutOfMemory:
            return
        self.check(pages, entry.tokens[:tokens].tolist())
        pages.release()

    # -- as the engine does it ----------------------------------------------------------------------------------

    def serve(self, slot: int, ids: list[int], tenant: str) -> None:
        query = self.keeper.query(tenant, np.array(ids, np.int32))
        lives = [(live, False) for live in self.slots if live is not None]
        expected = self.longest(ids, tenant)
        excluded: frozenset[str] = frozenset()
        while True:
            candidate = self.keeper.find(query, lives, excluded)
            if not excluded:
                assert (candidate.shared if candidate else 0) == min(expected, len(ids) - 1)
            pages = self.resume(candidate, slot)
            if candidate is None or pages is not None:
                break
            assert candidate.found is not None
            excluded |= {candidate.found.entry.id}
            lives = [(live, False) for live in self.slots if live is not None]
        live = Live.begin(self.parts.scene.identity, tenant, self.parts.scene.pools)
        if candidate is not None and pages is not None:
            self.check(pages, ids[: candidate.shared])
            live.adopt(pages, candidate.prompt[: candidate.shared])
            pages.release()
            if candidate.found is not None:
                if candidate.shared == len(candidate.found.entry.tokens) and candidate.found.level.rank == 0:
                    self.pinned.discard(candidate.found.entry.id)
                self.keeper.take(candidate)
        self.slots[slot] = live
        self.compute(live, ids[len(live.tokens) :])

    def resume(self, candidate: Candidate | None, slot: int) -> HeldPages | None:
        """Put away what the slot has, and get the candidate's pages."""
        pages = None
        try:
            if candidate is not None and candidate.live is not None:
                pages = self.keeper.hold(candidate)
            self.clear(slot, "switch")
            if candidate is not None and candidate.found is not None:
                restore = self.keeper.begin_restore(candidate)
                pages = self.keeper.finish_restore(candidate, restore) if restore is not None else None
        finally:
            if candidate is not None:
                self.keeper.release(candidate)
        return pages

    def clear(self, slot: int, reason: str) -> None:
        live, self.slots[slot] = self.slots[slot], None
        if live is not None:
            self.keeper.park(live, reason)

    def compute(self, live: Live, ids: list[int]) -> None:
        start = len(live.tokens)
        while True:
            try:
                live.table.prepare(start, len(ids))
                break
            except OutOfMemory:
                assert self.keeper.reclaim(), "three conversations always fit"
        live.tokens.extend(np.array(ids, np.int32))
        every = live.tokens.view().tolist()
        for pool, table in zip(self.parts.scene.pools, live.table.arrays(len(every)), strict=True):
            for block in range(start // PAGE_TOKENS, len(table)):
                page = int(table[block])
                assert pool.holders(page) == 1
                row = np.zeros((1, pool.layout.nbytes), np.uint8)
                pool.store.download([page], row).wait()
                first = max(start, block * PAGE_TOKENS)
                for position in range(first, min(len(every), (block + 1) * PAGE_TOKENS)):
                    at = position % PAGE_TOKENS * MARK
                    row[0, at : at + MARK] = np.frombuffer(mark(every[: position + 1]), np.uint8)
                pool.store.upload(row, [page]).wait()

    # -- the model ----------------------------------------------------------------------------------------------

    def stored(self) -> list[Entry]:
        return sorted((e for level in self.keeper.ladder.levels for e in level.entries()), key=lambda e: (e.used, e.id))

    def sequences(self) -> list[tuple[list[int], str]]:
        lives = [(live.tokens.view().tolist(), live.tenant) for live in self.slots if live is not None]
        return lives + [(entry.tokens.tolist(), entry.tenant) for entry in self.stored()]

    def longest(self, ids: list[int], tenant: str) -> int:
        counts = [0]
        for other, owner in self.sequences():
            if owner == tenant:
                equal = [a == b for a, b in zip(ids, other, strict=False)]
                counts.append([*equal, False].index(False))
        return max(counts)

    def check(self, pages: HeldPages, ids: list[int]) -> None:
        assert pages.tokens == len(ids)
        for pool, table in zip(pages.pools, pages.tables, strict=True):
            rows = np.empty((len(table), pool.layout.nbytes), np.uint8)
            pool.store.download(table, rows).wait()
            for position in range(len(ids)):
                at = position % PAGE_TOKENS * MARK
                assert rows[position // PAGE_TOKENS, at : at + MARK].tobytes() == mark(ids[: position + 1])

    @invariant()
    def no_level_exceeds_its_bound_and_accounts_are_right(self) -> None:
        for level in self.keeper.ladder.levels:
            usage = level.usage()
            assert usage.bytes == level.weigh(level.entries())
            assert usage.bytes <= (usage.max_bytes or 0)
            assert usage.entries <= (usage.max_entries or 0)

    @invariant()
    def pinned_entries_are_still_there(self) -> None:
        assert self.pinned <= {entry.id for entry in self.stored()}

    @invariant()
    def live_conversations_have_their_contents(self) -> None:
        for live in self.slots:
            if live is not None:
                pages = live.table.hold(len(live.tokens))
                self.check(pages, live.tokens.view().tolist())
                pages.release()

    def teardown(self) -> None:
        for live in self.slots:
            if live is not None:
                live.release()
        self.keeper.close()
        assert self.parts.scene.used == 0
        assert sum(pool.used for pool in self.parts.host) == 0


class OnADevice(Conversations):
    copies = True


@pytest.mark.parametrize("machine", [Conversations, OnADevice], ids=["references", "copies"])
def test_any_history(machine: type[Conversations]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)
    )
