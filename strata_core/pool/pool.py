"""Reference-counted pages of one layout.

A page is held by whoever retained it: slots, parked conversations, writers. While it is held more than once it is
immutable; :meth:`PagePool.own` gives a holder a page that it alone holds, by copying if need be (copy-on-write). A page
with no holder is free at once.

Memory grows and shrinks by chunks. The lowest chunk with room is filled first, so that high chunks run empty and can be
given back; one empty chunk is kept, or what is asked for, so that what is taken and given back in turn, as by a slot
growing and shrinking at a chunk's edge, does not allocate each time.
"""

from __future__ import annotations

import heapq

from strata_core.compute.base import PageStore
from strata_core.errors import OutOfMemory
from strata_core.pool.layout import PageLayout

#: Chunks are about this large: few enough to allocate quickly, small enough to give back often.
CHUNK_BYTES = 32 << 20


def chunk_pages_for(layout: PageLayout) -> int:
    """Pages in a chunk of about :data:`CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // layout.nbytes)


class PagePool:
    """Allocates the pages of one :class:`PageStore`. Used by the engine thread only.

    :param max_pages: bound on pages in use; allocating more raises :class:`OutOfMemory`.
    :param exchanged: pages that are taken and given back again and again, all at a time: recurrent states, of which
        every step writes new ones. Empty chunks with room for so many are kept.
    """

    def __init__(self, store: PageStore, max_pages: int, exchanged: int = 1):
        self.store = store
        self._spare_chunks = -(-exchanged // store.chunk_pages)
        self.layout = store.layout
        self.max_pages = max_pages
        self._holders: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}  # chunk -> heap of its free pages
        self._open: list[int] = []  # heap of chunks with free pages, and some that have none any more
        self._empty: set[int] = set()  # chunks of which no page is held

    @property
    def used(self) -> int:
        """Pages held by anyone."""
        return len(self._holders)

    @property
    def capacity(self) -> int:
        """Pages that memory is allocated for now."""
        return len(self._free) * self.store.chunk_pages

    @property
    def nbytes(self) -> int:
        """Bytes of memory allocated now."""
        return self.capacity * self.layout.nbytes

    def allocate(self) -> int:
        """A page with undefined content, held once by the caller.

        :raises OutOfMemory: ``max_pages`` are in use, or the store has no memory for another chunk.
        """
        if self.used >= self.max_pages:
            raise OutOfMemory(f"all {self.max_pages} pages of the {self.layout.kind!r} pool are in use")
        while self._open and not self._free.get(self._open[0]):
            heapq.heappop(self._open)
        chunk = self._open[0] if self._open else self._add_chunk()
        page = heapq.heappop(self._free[chunk])
        self._holders[page] = 1
        self._empty.discard(chunk)
        return page

    def retain(self, page: int) -> None:
        """Hold a page once more. It must be held by someone already."""
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Hold a page once less; without a holder it is free."""
        holders = self._holders[page] - 1
        if holders:
            self._holders[page] = holders
            return
        del self._holders[page]
        chunk = page // self.store.chunk_pages
        free = self._free[chunk]
        if not free:
            heapq.heappush(self._open, chunk)
        heapq.heappush(free, page)
        if len(free) == self.store.chunk_pages:
            self._empty.add(chunk)
            self._give_back()

    def holders(self, page: int) -> int:
        """How many times a page is held; 0 for a free one."""
        return self._holders.get(page, 0)

    def own(self, page: int) -> int:
        """Exchange one hold on ``page`` for a page with the same content that only the caller holds.

        :raises OutOfMemory: a copy is needed and there is no page for it; the hold on ``page`` remains.
        """
        if self._holders[page] == 1:
            return page
        copy = self.allocate()
        try:
            self.store.copy(page, copy)
        except BaseException:
            self.release(copy)
            raise
        self.release(page)
        return copy

    def _add_chunk(self) -> int:
        chunk = next(c for c in range(len(self._free) + 1) if c not in self._free)
        self.store.add_chunk(chunk)
        first = chunk * self.store.chunk_pages
        self._free[chunk] = list(range(first, first + self.store.chunk_pages))
        self._empty.add(chunk)
        heapq.heappush(self._open, chunk)
        return chunk

    def _give_back(self) -> None:
        """Drop all empty chunks but the lowest, as many as stay."""
        for chunk in sorted(self._empty)[self._spare_chunks :]:
            self.store.drop_chunk(chunk)
            del self._free[chunk]
            self._empty.discard(chunk)
