"""One step's rows, positions and page tables as kernels take them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from strata_core.compute.base import Batch, PageStore, Span
from strata_core.compute.reference import attention
from strata_core.errors import BackendError

from . import library as native
from .pages import CpuPageStore


class Step:
    """A batch and its page stores; valid as long as they are.

    :raises BackendError: a store of another backend, or a page table that does not cover its span.
    """

    def __init__(self, batch: Batch, stores: Sequence[PageStore]):
        self.batch = batch
        self.stores = tuple(store for store in stores if isinstance(store, CpuPageStore))
        if len(self.stores) != len(stores):
            raise BackendError("the cpu backend can only use page stores that it made")
        attended = self.stores[: len(batch.spans[0].tables)]  # behind them there may be a store of recurrent states
        self.positions = batch.positions
        self.pages = attention.StepPages(batch, self.stores)
        self.outputs = np.ascontiguousarray(batch.outputs, np.int32)
        self._tables = [_span_tables(attended, span) for span in batch.spans]
        self._addresses = (ctypes.c_void_p * (len(batch.spans) * len(attended)))(
            *(table.ctypes.data for tables in self._tables for table in tables)
        )
        base, pitch = ctypes.addressof(self._addresses), 8 * len(attended)
        spans = [native.Span(span.start, span.rows, base + i * pitch) for i, span in enumerate(batch.spans)]
        structs = [ctypes.pointer(store.struct) for store in attended]
        self.struct = native.Step(
            batch.rows,
            len(spans),
            len(self.outputs),
            (native.Span * len(spans))(*spans),
            self.positions.ctypes.data,
            self.outputs.ctypes.data,
            (ctypes.POINTER(native.Store) * len(structs))(*structs),
        )


def _span_tables(stores: Sequence[CpuPageStore], span: Span) -> list[np.ndarray]:
    tables = []
    for store, given in zip(stores, span.tables, strict=True):
        positions = span.start + span.rows
        pages = store.layout.pages_for(positions)
        if len(given) < pages:
            raise BackendError(f"a page table of {len(given)} pages does not cover {positions} positions")
        table = np.ascontiguousarray(given[:pages], np.int32)
        store.check(table)
        tables.append(table)
    return tables
