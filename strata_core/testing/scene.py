"""The engine's side of a storage level: pools, and conversations whose pages have contents that can be told apart.

Every page's bytes follow from what the page stands for - the identity and all token ids up to its end - as K/V do. So
pages of a common prefix are equal, all others differ, and what comes back from a level can be compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import attrs
import numpy as np
from blake3 import blake3

from strata_core.compute.base import PageStore
from strata_core.compute.reference import NumpyPageStore
from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import Query
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level

PAGE_TOKENS = 4

#: One kind of page, as most models have, and two kinds with different types and sizes.
LAYOUTS: dict[str, tuple[PageLayout, ...]] = {
    "one layout": (
        PageLayout.attention(layers=2, kv_heads=1, head_dim=4, kv_type="f16", page_tokens=PAGE_TOKENS),
    ),
    "two layouts": (
        PageLayout.attention(layers=1, kv_heads=2, head_dim=8, kv_type="f32", page_tokens=PAGE_TOKENS),
        PageLayout.attention(layers=2, kv_heads=1, head_dim=4, kv_type="int8", page_tokens=PAGE_TOKENS, kind="window"),
    ),
}


#: Recurrent state of two layers.
STATES = PageLayout.state([("conv", 1, 24), ("delta", 2, 16)])


def numpy_store(layout: PageLayout) -> PageStore:
    """A page store in ordinary host memory, in chunks of 8 pages."""
    return NumpyPageStore(layout, 8, PortableArena("off"))


@attrs.define(eq=False)
class Scene:
    """See the module's docstring.

    :ivar pools: the engine's pools.
    :ivar identity: what its K/V are compatible with.
    :ivar state_pool: of the engine, for a model with recurrent state.
    """

    pools: tuple[PagePool, ...]
    identity: Identity
    state_pool: PagePool | None = None
    _numbers: count[int] = attrs.field(factory=count)

    @classmethod
    def build(
        cls,
        layouts: Sequence[PageLayout],
        make_store: Callable[[PageLayout], PageStore] = numpy_store,
        max_pages: int = 1 << 16,
        states: PageLayout | None = None,
    ) -> Scene:
        """A scene with empty pools of the given layouts."""
        pools = tuple(PagePool(make_store(layout), max_pages) for layout in layouts)
        state_pool = None if states is None else PagePool(make_store(states), max_pages)
        return cls(pools, Identity.of({"weights": "scene"}), state_pool)

    @property
    def page_tokens(self) -> int:
        return self.pools[0].layout.page_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one page of every pool."""
        return sum(pool.layout.nbytes for pool in self.pools)

    @property
    def used(self) -> int:
        """Pages held by anyone, over all pools."""
        return sum(pool.used for pool in (*self.pools, *([self.state_pool] if self.state_pool is not None else [])))

    def query(self, tokens: Sequence[int] | np.ndarray, identity: Identity | None = None) -> Query:
        """A prompt to look up."""
        identity, ids = identity or self.identity, _ids(tokens)
        return Query(identity.digest, ids, page_addresses(identity, ids, self.page_tokens))

    def entry(self, tokens: Sequence[int] | np.ndarray, identity: Identity | None = None, **fields: object) -> Entry:
        """An entry of these tokens. ``used`` grows from entry to entry; ``fields`` replace what is made up."""
        identity, ids = identity or self.identity, _ids(tokens)
        ids.setflags(write=False)
        number = next(self._numbers)
        addresses = page_addresses(identity, ids, self.page_tokens)
        entry = Entry(
            f"e{number}", f"c{number}", identity.digest, ids, addresses, 1000.0 + number, 2000.0 + number, "switch"
        )
        return attrs.evolve(entry, **fields) if fields else entry  # type: ignore[arg-type]

    def blocks(self, entry: Entry) -> list[tuple[np.ndarray, ...]]:
        """What the pages of an entry hold: for every block one uint8 array ``(layout.nbytes,)`` per pool."""
        names = list(entry.addresses)
        if len(entry.tokens) % self.page_tokens:
            names.append(entry.identity + entry.tokens.tobytes())
        return [
            tuple(
                np.frombuffer(blake3(name + bytes([number])).digest(length=pool.layout.nbytes), np.uint8)
                for number, pool in enumerate(self.pools)
            )
            for name in names
        ]

    def state(self, entry: Entry, position: int) -> np.ndarray:
        """What the state of an entry at a position holds: uint8 ``(layout.nbytes,)``."""
        assert self.state_pool is not None
        name = entry.identity + entry.tokens[:position].tobytes()
        return np.frombuffer(blake3(name).digest(length=self.state_pool.layout.nbytes), np.uint8)

    def sink(self, entry: Entry, tokens: int) -> PageSink:
        """Room for the first positions of an entry, and for its states among them."""
        states = [position for position in entry.states or () if position <= tokens]
        return PageSink(self.pools, tokens, None if self.state_pool is None else (self.state_pool, states))

    def pages(self, entry: Entry) -> HeldPages:
        """Fresh pages with the entry's contents, held for the caller."""
        sink = self.sink(entry, len(entry.tokens))
        for number, block in enumerate(self.blocks(entry)):
            sink.put(number, block)
        for position in sink.states:
            sink.put(sink.state(position), [self.state(entry, position)])
        return sink.finish()

    def put(self, level: Level, tokens: Sequence[int] | np.ndarray, **fields: object) -> Entry:
        """Put a new entry of these tokens on a level, and let go of its pages."""
        entry = self.entry(tokens, **fields)  # type: ignore[arg-type]
        pages = self.pages(entry)
        try:
            level.put(entry, pages)
        finally:
            pages.release()
        return entry

    def read(self, pages: HeldPages) -> list[tuple[np.ndarray, ...]]:
        """What pages hold now, like :meth:`blocks`."""
        columns = []
        for pool, table in zip(pages.pools, pages.tables, strict=True):
            rows = np.empty((len(table), pool.layout.nbytes), np.uint8)
            pool.store.download(table, rows).wait()
            columns.append(list(rows))
        return list(zip(*columns, strict=True))

    def holds(self, pages: HeldPages, entry: Entry) -> bool:
        """Whether pages have the contents of the entry's blocks, from the first on."""
        if pages.states is not None:
            for position, page in zip(pages.states.positions, pages.states.pages, strict=True):
                row = np.empty((1, pages.states.pool.layout.nbytes), np.uint8)
                pages.states.pool.store.download([page], row).wait()
                if not np.array_equal(row[0], self.state(entry, position)):
                    return False
        expected = self.blocks(entry)[: len(pages.tables[0])]
        found = self.read(pages)
        return len(found) == len(expected) and all(
            np.array_equal(page, wanted)
            for pages_found, pages_wanted in zip(found, expected, strict=True)
            for page, wanted in zip(pages_found, pages_wanted, strict=True)
        )

    def restore(self, level: Level, entry: Entry, tokens: int) -> HeldPages:
        """Load the first ``tokens`` positions of an entry into fresh pages, held for the caller."""
        sink = self.sink(entry, tokens)
        try:
            level.load(entry, tokens, sink)
        except BaseException:
            sink.discard()
            raise
        return sink.finish()


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.array(tokens, np.int32)
