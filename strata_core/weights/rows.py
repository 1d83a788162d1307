"""Single rows of a table that is too large to hold, such as the n-gram embeddings of Qwen4-Exp (28.8 GB).

Three ways, with equal results: through the mapping of the file (``mmap``: the system decides what stays in memory), by
reads that pass the system's page cache by, with a cache of rows of our own that is bounded to the byte (``direct``), or
from memory that holds the whole table (``ram``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.errors import ModelFileError, OutOfMemory, SettingsError
from strata_core.weights.quant import TYPES, dequantise
from strata_core.weights.quant.base import Bytes, Floats
from strata_core.weights.tensor import Place, StoredTensor

WAYS = ("mmap", "direct", "ram")

#: What disks read and O_DIRECT asks for.
_SECTOR = 4096
#: Reads under way at a time: what brings a solid-state disk to its rate of small reads.
_READERS = 8


@attrs.define
class RowCounters:
    """What a table did since it was opened.

    :ivar rows: asked for.
    :ivar hits: of them, those that the own cache had.
    :ivar reads: reads from the file, one for a row however often a call asks for it; :ivar read_bytes: their bytes.
        Both of ``direct`` only: nobody counts what a mapping reads.
    :ivar cached_bytes: held by the own cache.
    """

    rows: int = 0
    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    cached_bytes: int = 0


class RowTable(ABC):
    """Rows of a two-dimensional tensor as float32. One thread uses it.

    :ivar width: elements of a row.
    """

    def __init__(self, tensor: StoredTensor):
        self.tensor = tensor
        self.width = tensor.shape[1]
        self.counters = RowCounters()
        self._kind = TYPES[tensor.type]
        self._row_bytes = self._kind.nbytes(self.width)

    def rows(self, ids: NDArray[np.int64]) -> Floats:
        """``(len(ids), width)`` float32.

        :param ids: numbers of rows; what is out of range raises IndexError.
        :raises ModelFileError: the file cannot be read any more.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tensor.shape[0]:
            raise IndexError(f"{self.tensor.name} has {self.tensor.shape[0]} rows, but row {ids.max()} is asked for")
        self.counters.rows += len(ids)
        stored = self._stored(ids)
        return dequantise(self._kind, stored.reshape(-1)).reshape(len(ids), self.width)

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back files and threads."""

    @abstractmethod
    def _stored(self, ids: NDArray[np.int64]) -> Bytes:
        """The rows' bytes, ``(len(ids), row bytes)``."""


def open_rows(tensor: StoredTensor, way: str, cache_bytes: int) -> RowTable:
    """
    :param way: one of :data:`WAYS`.
    :param cache_bytes: bound of the cache of ``direct``.
    :raises SettingsError: an unknown way, or one that the table cannot be read in.
    :raises OutOfMemory: the table does not fit. :raises ModelFileError: the file cannot be opened.
    """
    if way == "mmap":
        return MappedRows(tensor)
    if way == "ram":
        return ResidentRows(tensor)
    if way != "direct":
        raise SettingsError(f"rows are read by {', '.join(WAYS)}, not {way!r}", param="ple_io")
    if tensor.place is None:
        raise SettingsError(
            f"tensor {tensor.name} does not lie in one piece in a file, so it cannot be read directly; use mmap or ram",
            param="ple_io",
        )
    return DirectRows(tensor, tensor.place, cache_bytes)


class MappedRows(RowTable):
    """Through the mapping of the file."""

    def _stored(self, ids: NDArray[np.int64]) -> Bytes:
        if self.tensor.derived:  # all of its data at once would be a copy of the table
            rows = [self.tensor.rows(row, row + 1) for row in ids.tolist()]
            return np.concatenate(rows) if rows else np.empty(0, np.uint8)
        stored: Bytes = self.tensor.data.reshape(-1, self._row_bytes)[ids]
        return stored


class ResidentRows(RowTable):
    """From a copy in memory."""

    def __init__(self, tensor: StoredTensor):
        super().__init__(tensor)
        try:
            self._table = np.empty((tensor.shape[0], self._row_bytes), np.uint8)
        except MemoryError as error:
            problem = f"no memory for the {tensor.nbytes >> 20} MiB of tensor {tensor.name}; use mmap or direct"
            raise OutOfMemory(problem) from error
        step = max(1, (16 << 20) // self._row_bytes)
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            self._table[start:stop] = tensor.rows(start, stop).reshape(-1, self._row_bytes)

    def _stored(self, ids: NDArray[np.int64]) -> Bytes:
        stored: Bytes = self._table[ids]
        return stored


class DirectRows(RowTable):
    """By reads past the system's page cache where the file system allows, with the last used rows kept.

    The cache holds at most ``cache_bytes`` of rows and gives up the one not used for longest; a bound below one row
    keeps none.
    """

    def __init__(self, tensor: StoredTensor, place: Place, cache_bytes: int):
        super().__init__(tensor)
        self._path, self._offset = place.path, place.offset
        self._file = _open(place)
        # Memory of the cache: the system gives it page by page as rows come to be kept.
        self._kept = np.empty((min(cache_bytes // self._row_bytes, tensor.shape[0]), self._row_bytes), np.uint8)
        self._slots: OrderedDict[int, int] = OrderedDict()  # where a row is kept, the least recently used row first
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="strata-rows")
        self._local = threading.local()

    def close(self) -> None:
        self._threads.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _stored(self, ids: NDArray[np.int64]) -> Bytes:
        wanted, places = np.unique(ids, return_inverse=True)  # in order, so that neighbours are read after each other
        slots = np.array([self._slots.get(row, -1) for row in wanted.tolist()], np.int64)
        known = slots >= 0
        stored = np.empty((len(wanted), self._row_bytes), np.uint8)
        stored[known] = self._kept[slots[known]]
        missing = np.flatnonzero(~known)
        shares = [missing[first::_READERS] for first in range(min(_READERS, len(missing)))]
        sizes = self._threads.map(lambda share: self._read_rows(wanted[share], share, stored), shares)
        self.counters.read_bytes += sum(sizes)
        self.counters.reads += len(missing)
        self.counters.hits += int(known[places].sum())
        self._keep(wanted, known, stored)
        return stored[places.reshape(-1)]

    def _keep(self, rows: NDArray[np.int64], known: NDArray[np.bool_], stored: Bytes) -> None:
        """Note that these rows were used, and keep those that were not known."""
        for row in rows[known].tolist():
            self._slots.move_to_end(row)
        for place in np.flatnonzero(~known)[: len(self._kept)].tolist():
            slot = len(self._slots)
            if slot == len(self._kept):
                _, slot = self._slots.popitem(last=False)
            self._kept[slot] = stored[place]
            self._slots[int(rows[place])] = slot
        self.counters.cached_bytes = len(self._slots) * self._row_bytes

    def _read_rows(self, rows: NDArray[np.int64], places: NDArray[np.intp], stored: Bytes) -> int:
        """Read rows into their places of ``stored``; returns how many bytes were read, whole sectors. Any thread."""
        total = 0
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            start = self._offset + row * self._row_bytes
            first = start // _SECTOR * _SECTOR
            inside = start - first
            buffer = self._buffer(-(-(inside + self._row_bytes) // _SECTOR) * _SECTOR)
            try:
                got = os.preadv(self._file, [buffer], first)
            except OSError as error:
                raise ModelFileError(f"{self._path}: cannot be read: {error}") from error
            if got < inside + self._row_bytes:
                raise ModelFileError(f"{self._path}: ends within tensor {self.tensor.name}", param=self.tensor.name)
            stored[place] = np.frombuffer(buffer, np.uint8)[inside : inside + self._row_bytes]
            total += got
        return total

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread that begins on a page, as O_DIRECT asks for."""
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = mmap.mmap(-1, size)
        return memoryview(buffer)[:size]


def _open(place: Place) -> int:
    """The file, for reads past the page cache where that is possible.

    :raises SettingsError: the system has no reads at a place. :raises ModelFileError: the file cannot be opened.
    """
    if not hasattr(os, "preadv"):
        raise SettingsError("this system has no direct reads; use mmap or ram", param="ple_io")
    with contextlib.suppress(OSError):  # file systems in memory refuse the flag
        file = os.open(place.path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            os.preadv(file, [memoryview(mmap.mmap(-1, _SECTOR))], 0)  # some only refuse the read
            return file
        except OSError:
            os.close(file)
            raise
    try:
        return os.open(place.path, os.O_RDONLY)
    except OSError as error:
        raise ModelFileError(f"{place.path}: cannot be opened: {error}") from error
