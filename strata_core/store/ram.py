"""The RAM level: parked conversations as page references, or as copies where the engine's pages are on a device.

An entry is pushed when its conversation leaves a slot and pulled by reference, so that on host memory parking and
resuming copy nothing. Pages that several entries have in common (a system prompt) are held, and counted, once: an
entry's pages are exchanged for those already held at the same address before it is taken in. Eviction order is the
coordinator's; this level only keeps the account, which covers pages, token ids and addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import attrs
import numpy as np

from strata_core.compute.base import Event
from strata_core.conversations.identity import DIGEST_BYTES
from strata_core.conversations.index import PrefixIndex, Query
from strata_core.errors import BackendError, DamagedEntry, LevelError, OutOfMemory
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.states import HeldStates
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Outcome, Usage

#: Bytes charged per entry for its objects (dictionaries, index lists), beside pages, ids and addresses.
ENTRY_OVERHEAD = 4096

#: One block's page numbers, one per pool.
Block = tuple[int, ...]
#: What equal states have in common.
StateName = bytes | tuple[str, int]


@attrs.define
class _Kept:
    entry: Entry
    pages: HeldPages
    copies: list[Event]  # under way from the device
    source: HeldPages | None  # the device pages they read, until all are done
    damaged: bool = False  # a copy failed


class RamLevel(Level):
    """Entries in host memory.

    :param pools: where entries' pages live: the engine's own pools when these are in host memory, else host pools.
    :param copies: whether ``pools`` are separate from the engine's, so that pages must be copied.
    :param max_bytes: hard bound on all that entries hold; the level refuses what would exceed it.
    :param state_pool: the same for recurrent states; None for models without.
    """

    name = "ram"
    rank = 0

    def __init__(
        self,
        pools: Sequence[PagePool],
        *,
        copies: bool,
        max_bytes: int,
        max_entries: int,
        state_pool: PagePool | None = None,
    ):
        self._pools = tuple(pools)
        self._state_pool = state_pool
        self._state_bytes = 0 if state_pool is None else state_pool.layout.nbytes
        self._copies = copies
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._block_bytes = sum(pool.layout.nbytes for pool in pools)
        self._bytes = 0  # held by all entries
        self._kept: dict[str, _Kept] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._holders: Counter[bytes] = Counter()  # how many entries hold the page with each address
        self._state_holders: Counter[StateName] = Counter()

    def entries(self) -> Collection[Entry]:
        return [kept.entry for kept in self._kept.values()]

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        return [(self._kept[key].entry, shared) for key, shared in self._index.longest(query, excluded)]

    def usage(self) -> Usage:
        return Usage(self._bytes, len(self._kept), self._max_bytes, self._max_entries)

    def weigh(self, entries: Collection[Entry]) -> int:
        addresses = {address for entry in entries for address in entry.addresses}
        blocks = len(addresses) + sum(self._tail_blocks(entry) for entry in entries)
        states = {name for entry in entries for name in self._state_names(entry)}
        pages = blocks * self._block_bytes + len(states) * self._state_bytes
        return pages + sum(_ids_bytes(entry) for entry in entries)

    def cost(self, entry: Entry) -> int:
        new = sum(address not in self._holders for address in entry.addresses)
        states = sum(name not in self._state_holders for name in self._state_names(entry))
        blocks = new + self._tail_blocks(entry)
        return blocks * self._block_bytes + states * self._state_bytes + _ids_bytes(entry)

    def put(self, entry: Entry, pages: HeldPages) -> Outcome:
        usage, cost = self.usage(), self.cost(entry)
        if usage.bytes + cost > self._max_bytes or usage.entries + 1 > self._max_entries:
            raise LevelError(f"no room in RAM: {usage.bytes} bytes held, {cost} more, {self._max_bytes} allowed")
        kept = self._copy(entry, pages) if self._copies else self._refer(entry, pages)
        self._kept[entry.id] = kept
        self._index.add(entry.id, entry)
        self._holders.update(entry.addresses)
        self._state_holders.update(self._state_names(entry))
        self._bytes += cost
        return Outcome("stored", entry)

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        kept = self._kept[entry.id]
        self._settle(kept)
        if kept.damaged:
            self.remove(entry)
            raise DamagedEntry("a page was not copied from the device when the conversation was parked")
        for number, block in zip(range(sink.blocks), _blocks(kept.pages), strict=False):
            sink.put(number, [_host(pool, page) for pool, page in zip(self._pools, block, strict=True)])
        states = kept.pages.states
        for position in sink.states:
            if states is None or position not in states.positions:
                raise LevelError(f"the entry has no state at position {position}")
            sink.put(sink.state(position), [_host(states.pool, states.page(position))])

    def held(self, entry: Entry) -> HeldPages | None:
        kept = self._kept[entry.id]
        self._settle(kept)
        return None if kept.damaged else kept.pages

    def remove(self, entry: Entry) -> None:
        kept = self._kept.pop(entry.id)
        self._index.remove(entry.id)
        for address in kept.entry.addresses:
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address]
        for name in self._state_names(kept.entry):
            self._state_holders[name] -= 1
            if not self._state_holders[name]:
                del self._state_holders[name]
        self._bytes -= self.cost(kept.entry)  # what it would add now is what it no longer holds
        self._settle(kept)  # a copy under way still writes to pages that are about to be free
        kept.pages.release()

    def update(self, entry: Entry) -> None:
        self._kept[entry.id].entry = entry  # the index goes by tokens and addresses, which are the same

    def busy(self) -> bool:
        return any(kept.source is not None for kept in self._kept.values())

    def poll(self) -> Sequence[Outcome]:
        for kept in self._kept.values():
            if kept.source is not None and all(event.done() for event in kept.copies):
                self._settle(kept)
        return ()

    def settle(self) -> None:
        for kept in self._kept.values():
            self._settle(kept)

    def close(self) -> None:
        for entry in self.entries():
            self.remove(entry)

    def _tail_blocks(self, entry: Entry) -> int:
        """1 where the entry ends within a page, which no other entry shares."""
        return self._pools[0].layout.pages_for(len(entry.tokens)) - len(entry.addresses)

    def _state_names(self, entry: Entry) -> list[StateName]:
        """What tells the entry's states apart from those of others. A state within a page is the entry's own."""
        size = self._pools[0].layout.page_tokens
        return [
            (entry.id, position) if position % size else entry.addresses[position // size - 1]
            for position in entry.states or ()
        ]

    def _state_pages(self, entry: Entry) -> dict[int, tuple[int, _Kept]]:
        """States of the entry that are held already: position -> page and holder."""
        size, found = self._pools[0].layout.page_tokens, {}
        for position in entry.states or ():
            if position % size:
                continue
            for key in self._index.holders(entry.addresses[position // size - 1]):
                states = self._kept[key].pages.states
                if states is not None and position in states.positions and not self._kept[key].damaged:
                    found[position] = (states.page(position), self._kept[key])
                    break
        return found

    @staticmethod
    def _settle(kept: _Kept) -> None:
        """Wait for the copies of an entry, failed ones too, and only then let go of the device pages."""
        for event in kept.copies:
            try:
                event.wait()
            except BackendError:
                kept.damaged = True
        kept.copies.clear()
        if kept.source is not None:
            kept.source.release()
            kept.source = None

    def _holders_of(self, entry: Entry) -> list[_Kept]:
        """What holds the blocks of the entry's longest beginning that is held already, block by block."""
        found: list[_Kept] = []
        for address in entry.addresses:
            kept = (self._kept[key] for key in self._index.holders(address))
            holder = next((k for k in kept if not k.damaged), None)
            if holder is None:
                break
            found.append(holder)
        return found

    def _refer(self, entry: Entry, pages: HeldPages) -> _Kept:
        tables = [list(table) for table in pages.tables]
        for number, holder in enumerate(self._holders_of(entry)):
            for table, page in zip(tables, _block(holder.pages, number), strict=True):
                table[number] = page
        states = None
        if pages.states is not None:
            known = self._state_pages(entry)
            own = zip(pages.states.positions, pages.states.pages, strict=True)
            chosen = [known[position][0] if position in known else page for position, page in own]
            states = HeldStates(pages.states.pool, pages.states.positions, chosen)
        return _Kept(entry, HeldPages(self._pools, tables, pages.tokens, states), [], None)

    def _copy(self, entry: Entry, pages: HeldPages) -> _Kept:
        holders = self._holders_of(entry)
        known = [_block(holder.pages, number) for number, holder in enumerate(holders)]
        tables: list[list[int]] = [[block[i] for block in known] for i in range(len(self._pools))]
        fresh: list[tuple[PagePool, int]] = []
        # Blocks that others hold may still be on their way; this entry has to wait for them as well.
        copies = [event for holder in {id(h): h for h in holders}.values() for event in holder.copies]
        kept = _Kept(entry, HeldPages(self._pools, [()] * len(self._pools), 0), copies, pages.fork(pages.tokens))
        try:
            for device, pool, source, table in zip(pages.pools, self._pools, pages.tables, tables, strict=True):
                for page in source[len(known) :]:
                    copy = pool.allocate()
                    fresh.append((pool, copy))
                    table.append(copy)
                    kept.copies.append(device.store.download([page], _host(pool, copy).reshape(1, -1)))
            kept.pages = HeldPages(self._pools, tables, pages.tokens, self._copy_states(kept, pages, fresh))
            return kept
        except (BackendError, OutOfMemory) as error:
            self._settle(kept)
            raise LevelError(str(error)) from error
        finally:
            for pool, page in fresh:
                pool.release(page)  # where all went well, the handle holds it now


    def _copy_states(
        self, kept: _Kept, pages: HeldPages, fresh: list[tuple[PagePool, int]]
    ) -> HeldStates | None:
        source, pool = pages.states, self._state_pool
        if source is None or pool is None:
            return None
        known, chosen = self._state_pages(kept.entry), []
        for position, page in zip(source.positions, source.pages, strict=True):
            if position in known:
                copy, holder = known[position]
                kept.copies += holder.copies  # it may still be on its way
            else:
                copy = pool.allocate()
                fresh.append((pool, copy))
                kept.copies.append(source.pool.store.download([page], _host(pool, copy).reshape(1, -1)))
            chosen.append(copy)
        return HeldStates(pool, source.positions, chosen)


def _ids_bytes(entry: Entry) -> int:
    return int(entry.tokens.nbytes) + DIGEST_BYTES * len(entry.addresses) + ENTRY_OVERHEAD


def _block(pages: HeldPages, number: int) -> Block:
    return tuple(table[number] for table in pages.tables)


def _blocks(pages: HeldPages) -> list[Block]:
    return list(zip(*pages.tables, strict=True))


def _host(pool: PagePool, page: int) -> np.ndarray:
    view = pool.store.host_view(page)
    if view is None:
        raise LevelError("the RAM level's pages are not in host memory")
    return view
