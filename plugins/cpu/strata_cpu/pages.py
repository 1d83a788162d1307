"""Pages in host memory, with the addresses that kernels need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata_core.compute.reference import NumpyPageStore
from strata_core.errors import BackendError
from strata_core.pool.layout import PageLayout

from . import library as native

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena


class CpuPageStore(NumpyPageStore):
    """The reference's page store, which also keeps the address of every chunk.

    :ivar struct: what native functions take; its chunk of an absent number is NULL.
    """

    def __init__(self, layout: PageLayout, chunk_pages: int, arena: Arena):
        super().__init__(layout, chunk_pages, arena)
        self._addresses = np.zeros(16, np.uint64)
        self._there = np.zeros(16 * chunk_pages, bool)  # by page
        self.struct = native.Store(
            native.KV_TYPES.index(layout.kv_type), layout.page_tokens, chunk_pages, layout.nbytes, 0
        )
        self.struct.chunks = self._addresses.ctypes.data

    def add_chunk(self, chunk: int) -> None:
        super().add_chunk(chunk)
        if chunk >= len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.zeros(chunk + 1, np.uint64)])
            self._there = np.concatenate([self._there, np.zeros((chunk + 1) * self.chunk_pages, bool)])
            self.struct.chunks = self._addresses.ctypes.data
        first = self.host_view(chunk * self.chunk_pages)
        assert first is not None
        self._addresses[chunk] = first.ctypes.data
        self._pages_of(chunk)[:] = True

    def drop_chunk(self, chunk: int) -> None:
        super().drop_chunk(chunk)
        self._addresses[chunk] = 0
        self._pages_of(chunk)[:] = False

    def check(self, table: np.ndarray) -> None:
        """
        :raises BackendError: the table names a page that is not there, which a kernel would follow into nowhere.
        """
        try:
            there = bool(self._there.take(table.view(np.uint32)).all())  # what is negative is too large
        except IndexError:
            there = False
        if not there:
            raise BackendError(f"a page table names {self.layout.kind} pages that are not there: {table.tolist()}")

    def _pages_of(self, chunk: int) -> np.ndarray:
        return self._there[chunk * self.chunk_pages : (chunk + 1) * self.chunk_pages]
