"""A sequence's pages: its page tables over all pools, and the handle on pages that something else keeps.

:class:`PageTable` is what a slot writes through. :class:`HeldPages` is an immutable run of the same pages, as parked
conversations, other slots and writers hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata_core.pool.pool import PagePool
from strata_core.pool.states import HeldStates


class HeldPages:
    """References to the pages of positions ``0 .. tokens - 1``, one tuple of page numbers per pool.

    The holder calls :meth:`release` exactly once. The content does not change while it is held.

    :param states: of a model with recurrent state, the states at some of these positions; passes to this handle.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        tables: Sequence[Sequence[int]],
        tokens: int,
        states: HeldStates | None = None,
    ):
        self.pools = tuple(pools)
        self.states = states
        self.tables = tuple(tuple(table) for table in tables)
        self.tokens = tokens
        for pool, table in zip(self.pools, self.tables, strict=True):
            for page in table:
                pool.retain(page)

    def fork(self, tokens: int) -> HeldPages:
        """Another handle, on the pages of the first ``tokens`` positions and the states among them."""
        states = None if self.states is None else self.states.fork(tokens)
        return HeldPages(self.pools, _cut(self.pools, self.tables, tokens), tokens, states)

    def release(self) -> None:
        if self.states is not None:
            self.states.release()
        for pool, table in zip(self.pools, self.tables, strict=True):
            for page in table:
                pool.release(page)
        self.tables = tuple(() for _ in self.pools)
        self.tokens = 0


class PageTable:
    """The pages of a sequence that is being extended, and the only writer of those it owns."""

    def __init__(self, pools: Sequence[PagePool]):
        self._pools = tuple(pools)
        self._tables: tuple[list[int], ...] = tuple([] for _ in pools)

    def adopt(self, held: HeldPages) -> None:
        """Begin with the pages of ``held`` (shared: they are copied when written). The table must be empty."""
        for pool, table, pages in zip(self._pools, self._tables, held.tables, strict=True):
            for page in pages:
                pool.retain(page)
            table.extend(pages)

    def hold(self, tokens: int, states: HeldStates | None = None) -> HeldPages:
        """A handle on the pages of the first ``tokens`` positions, and on ``states``, which pass to it."""
        return HeldPages(self._pools, _cut(self._pools, self._tables, tokens), tokens, states)

    def prepare(self, start: int, rows: int) -> None:
        """Make positions ``start .. start + rows - 1`` writable: own their pages, allocate those that are missing.

        :raises OutOfMemory: pages are missing; those got so far stay in the table.
        """
        for pool, table in zip(self._pools, self._tables, strict=True):
            size = pool.layout.page_tokens
            for block in range(start // size, (start + rows - 1) // size + 1):
                if block < len(table):
                    table[block] = pool.own(table[block])
                else:
                    table.append(pool.allocate())

    def truncate(self, tokens: int) -> None:
        """Give up the pages that no position below ``tokens`` needs."""
        for pool, table in zip(self._pools, self._tables, strict=True):
            keep = pool.layout.pages_for(tokens)
            for page in table[keep:]:
                pool.release(page)
            del table[keep:]

    def arrays(self, tokens: int) -> tuple[np.ndarray, ...]:
        """Page tables covering the first ``tokens`` positions, int32, as a :class:`~strata_core.compute.base.Span`
        carries them."""
        return tuple(
            np.array(table[: pool.layout.pages_for(tokens)], np.int32)
            for pool, table in zip(self._pools, self._tables, strict=True)
        )


def _cut(pools: Sequence[PagePool], tables: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    return [table[: pool.layout.pages_for(tokens)] for pool, table in zip(pools, tables, strict=True)]
