"""Whatever slots and holders do, each sees the contents it should: page tables against lists of positions."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from pool_stores import MakeStore, shadow_store

from strata_core.errors import OutOfMemory
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages, PageTable
from strata_core.testing.scene import LAYOUTS, PAGE_TOKENS, numpy_store

MAX_PAGES = 12
MAX_TOKENS = 7 * PAGE_TOKENS
CHUNK = 8


@attrs.define(eq=False)
class Slot:
    """A table, and the value that each of its positions must read as."""

    table: PageTable
    values: list[int] = attrs.field(factory=list)


@attrs.define(eq=False)
class Holder:
    pages: HeldPages
    values: tuple[int, ...]


class Tables(RuleBasedStateMachine):
    """Positions are a byte each: byte ``position % PAGE_TOKENS`` of their page in every pool."""

    make_store: MakeStore
    slots = Bundle("slots")
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pools = [PagePool(type(self).make_store(layout), MAX_PAGES) for layout in LAYOUTS["two layouts"]]
        self.open_slots: list[Slot] = []
        self.open_holders: list[Holder] = []
        self.next_value = 0

    @rule(target=slots)
    def open(self) -> Slot:
        slot = Slot(PageTable(self.pools))
        self.open_slots.append(slot)
        return slot

    @rule(slot=slots, rows=st.integers(1, 2 * PAGE_TOKENS + 1))
    def append(self, slot: Slot, rows: int) -> None:
        self.write(slot, len(slot.values), rows)

    @rule(slot=slots, back=st.integers(1, PAGE_TOKENS + 2), rows=st.integers(1, PAGE_TOKENS))
    def rewind_and_write(self, slot: Slot, back: int, rows: int) -> None:
        start = max(0, len(slot.values) - back)
        slot.table.truncate(start)
        del slot.values[start:]
        self.write(slot, start, rows)

    @rule(slot=slots, keep=st.integers(0, MAX_TOKENS))
    def truncate(self, slot: Slot, keep: int) -> None:
        slot.table.truncate(keep)
        del slot.values[keep:]

    @rule(target=holders, slot=slots, part=st.integers(0, MAX_TOKENS))
    def hold(self, slot: Slot, part: int) -> Holder:
        tokens = min(part, len(slot.values))
        return self.held(Holder(slot.table.hold(tokens), tuple(slot.values[:tokens])))

    @rule(target=holders, holder=holders, part=st.integers(0, MAX_TOKENS))
    def fork(self, holder: Holder, part: int) -> Holder:
        tokens = min(part, len(holder.values))
        return self.held(Holder(holder.pages.fork(tokens), holder.values[:tokens]))

    @rule(target=slots, holder=holders)
    def resume(self, holder: Holder) -> Slot:
        slot = self.open()
        slot.table.adopt(holder.pages)
        slot.values = list(holder.values)
        return slot

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        holder.pages.release()
        self.open_holders.remove(holder)

    @precondition(lambda self: len(self.open_slots) > 2)
    @rule(target=slots, slot=consumes(slots))
    def close(self, slot: Slot) -> object:
        slot.table.truncate(0)
        self.open_slots.remove(slot)
        return multiple()

    def held(self, holder: Holder) -> Holder:
        self.open_holders.append(holder)
        return holder

    def write(self, slot: Slot, start: int, rows: int) -> None:
        rows = min(rows, MAX_TOKENS - start)
        if rows < 1:
            return
        free = [MAX_PAGES - pool.used for pool in self.pools]
        needed = sum(
            1
            for block in range(start // PAGE_TOKENS, (start + rows - 1) // PAGE_TOKENS + 1)
            if self.needs_page(slot, block)
        )
        try:
            slot.table.prepare(start, rows)
        except OutOfMemory:
            assert needed > min(free)
            return
        assert needed <= min(free)
        [first, _] = arrays = slot.table.arrays(start + rows)
        assert all(array.dtype == np.int32 and len(array) == len(first) for array in arrays)
        values = [self.value() for _ in range(rows)]
        for pool, table in zip(self.pools, arrays, strict=True):
            for position, value in enumerate(values, start):
                self.write_byte(pool, int(table[position // PAGE_TOKENS]), position % PAGE_TOKENS, value)
        slot.values[start:] = values

    def needs_page(self, slot: Slot, block: int) -> bool:
        [first, _] = slot.table.arrays(MAX_TOKENS)
        return block >= len(first) or self.pools[0].holders(int(first[block])) > 1

    def value(self) -> int:
        self.next_value = (self.next_value + 1) % 251
        return self.next_value

    @staticmethod
    def write_byte(pool: PagePool, page: int, offset: int, value: int) -> None:
        assert pool.holders(page) == 1, "a shared page is about to be written"
        row = np.empty((1, pool.layout.nbytes), np.uint8)
        pool.store.download([page], row).wait()
        row[0, offset] = value
        pool.store.upload(row, [page]).wait()

    def read(self, pool: PagePool, pages: list[int], tokens: int) -> list[int]:
        rows = np.empty((len(pages), pool.layout.nbytes), np.uint8)
        pool.store.download(pages, rows).wait()
        return [int(value) for value in rows[:, :PAGE_TOKENS].reshape(-1)[:tokens]]

    @invariant()
    def everyone_sees_their_own(self) -> None:
        for slot in self.open_slots:
            for pool, table in zip(self.pools, slot.table.arrays(len(slot.values)), strict=True):
                assert self.read(pool, table.tolist(), len(slot.values)) == slot.values
        for holder in self.open_holders:
            assert holder.pages.tokens == len(holder.values)
            for pool, pages in zip(self.pools, holder.pages.tables, strict=True):
                assert self.read(pool, list(pages), len(holder.values)) == list(holder.values)

    @invariant()
    def pages_in_use_are_exactly_those_in_tables(self) -> None:
        for number, pool in enumerate(self.pools):
            held: set[int] = set()
            for slot in self.open_slots:
                held |= set(slot.table.arrays(MAX_TOKENS)[number].tolist())
            for holder in self.open_holders:
                held |= set(holder.pages.tables[number])
            assert pool.used == len(held) <= MAX_PAGES
            assert pool.capacity % CHUNK == 0
            assert pool.capacity >= pool.used

    @invariant()
    def at_most_one_chunk_is_empty(self) -> None:
        for number, pool in enumerate(self.pools):
            chunks = {int(page) // CHUNK for slot in self.open_slots for page in slot.table.arrays(MAX_TOKENS)[number]}
            chunks |= {page // CHUNK for holder in self.open_holders for page in holder.pages.tables[number]}
            assert pool.capacity // CHUNK - len(chunks) <= 1

    def teardown(self) -> None:
        for slot in self.open_slots:
            slot.table.truncate(0)
        for holder in self.open_holders:
            holder.pages.release()
        for pool in self.pools:
            assert pool.used == 0
            assert pool.capacity <= CHUNK
            pool.store.close()


class NumpyTables(Tables):
    make_store = staticmethod(numpy_store)


class ShadowTables(Tables):
    make_store = staticmethod(shadow_store)


QUICK = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)
TestNumpyTables = NumpyTables.TestCase
TestNumpyTables.settings = QUICK
TestShadowTables = ShadowTables.TestCase
TestShadowTables.settings = QUICK


def test_prepare_that_runs_out_keeps_what_was_there(make_store: MakeStore) -> None:
    pools = [PagePool(make_store(layout), 3) for layout in LAYOUTS["two layouts"]]
    table = PageTable(pools)
    table.prepare(0, 2 * PAGE_TOKENS)
    before = [array.tolist() for array in table.arrays(2 * PAGE_TOKENS)]
    with pytest.raises(OutOfMemory):
        table.prepare(2 * PAGE_TOKENS, 2 * PAGE_TOKENS)
    assert [array.tolist() for array in table.arrays(2 * PAGE_TOKENS)] == before
    table.prepare(2 * PAGE_TOKENS, PAGE_TOKENS)
    table.truncate(0)
    assert [pool.used for pool in pools] == [0, 0]
