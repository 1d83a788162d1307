"""Pages on their way to a file: read where they are, if in the host's memory, else through a bounded staging area.

What is copied from a device is copied by the engine thread, when it polls; the writer waits for it. Staging stays about
:data:`STAGING_BYTES`, as only the entry that is being written is staged.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from strata_core.compute.base import Event
from strata_core.errors import BackendError, LevelError
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages
from strata_tiers.layout import Piece, Shape

STAGING_BYTES = 32 << 20
_WINDOWS = 4

Block = tuple[np.ndarray, ...]


class PageSource(ABC):
    """The pages of an entry, held until :meth:`release`. Its states are numbered on behind its blocks.

    :param pages: forked here; they stay as they are while they are held.
    :cvar any_order: blocks may be asked for in any order, and by several threads.
    """

    any_order = False

    def __init__(self, pages: HeldPages):
        self.pages = pages.fork(pages.tokens)
        self._count = len(pages.tables[0])

    def state_number(self, position: int) -> int:
        """The number under which the state at a position is a block."""
        if self.pages.states is None or position not in self.pages.states.positions:
            raise LevelError(f"there is no state at position {position}")
        return self._count + self.pages.states.positions.index(position)

    def numbers(self, piece: Piece, shape: Shape) -> range:
        """The numbers of the blocks that a segment or state is written from."""
        if piece.state:
            number = self.state_number(piece.stop)
            return range(number, number + 1)
        first = piece.start // shape.page_tokens
        return range(first, first + shape.blocks(piece.count))

    def reader(self, piece: Piece) -> Callable[[int], Block]:
        """What :func:`strata_tiers.segment.write` asks for the blocks of a segment or state."""
        if not piece.state:
            return self.block
        number = self.state_number(piece.stop)
        return lambda _: self.block(number)

    def located(self, number: int) -> list[tuple[PagePool, int]]:
        """The pool and page of each part of a block or state."""
        pages = self.pages
        if number < self._count:
            return [(pool, table[number]) for pool, table in zip(pages.pools, pages.tables, strict=True)]
        assert pages.states is not None
        return [(pages.states.pool, pages.states.pages[number - self._count])]

    @abstractmethod
    def block(self, number: int) -> Block:
        """One uint8 array per pool; valid until a later block is asked for. Called by the writer, ascending.

        :raises BackendError: it could not be copied from the device.
        """

    @abstractmethod
    def copy(self, number: int, buffers: Sequence[np.ndarray]) -> None:
        """Copy one block. Called by the engine thread, or, where pages are in host memory, by any."""

    def take(self, number: int) -> Block:
        """A copy, or view, of one block for the engine thread."""
        block = tuple(np.empty(pool.layout.nbytes, np.uint8) for pool, _ in self.located(number))
        self.copy(number, block)
        return block

    def stage(self, wanted: Sequence[int]) -> None:  # noqa: B027 - what is in host memory needs nothing
        """Say which blocks the writer will ask for, in that order. Called by the writer."""

    def pump(self) -> None:  # noqa: B027
        """Begin and finish copies. Called by the engine thread."""

    def stop(self) -> None:  # noqa: B027
        """End a wait for a copy with an error."""

    def release(self) -> None:
        """Give the pages back. Called by the engine thread when the writer is done with them."""
        self.pages.release()


class HostPages(PageSource):
    """Pages in host memory: views, no copies."""

    any_order = True

    def __init__(self, pages: HeldPages, blocks: list[Block]):
        super().__init__(pages)
        self._blocks = blocks

    def block(self, number: int) -> Block:
        return self._blocks[number]

    def take(self, number: int) -> Block:
        return self._blocks[number]

    def copy(self, number: int, buffers: Sequence[np.ndarray]) -> None:
        for view, buffer in zip(self._blocks[number], buffers, strict=True):
            np.copyto(buffer, view)

    def release(self) -> None:
        self._blocks = []
        super().release()


@attrs.define(eq=False)
class _Window:
    numbers: list[int]
    rows: list[np.ndarray]  # one (n, nbytes) per pool
    copies: list[Event]


class DevicePages(PageSource):
    """Pages on a device, staged window by window."""

    def __init__(self, pages: HeldPages):
        super().__init__(pages)
        self._changed = threading.Condition()
        self._wanted: deque[int] = deque()
        self._under_way: deque[_Window] = deque()
        self._ready: deque[_Window] = deque()
        self._error: Exception | None = None
        block = sum(pool.layout.nbytes for pool in pages.pools)
        self._window_blocks = max(1, STAGING_BYTES // _WINDOWS // block)

    def stage(self, wanted: Sequence[int]) -> None:
        with self._changed:
            self._wanted.extend(wanted)

    def block(self, number: int) -> Block:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                while self._ready and number not in self._ready[0].numbers:
                    self._ready.popleft()  # its blocks were written
                if self._ready:
                    window = self._ready[0]
                    row = window.numbers.index(number)
                    return tuple(rows[row] for rows in window.rows)
                self._changed.wait()

    def copy(self, number: int, buffers: Sequence[np.ndarray]) -> None:
        for (pool, page), buffer in zip(self.located(number), buffers, strict=True):
            pool.store.download([page], buffer.reshape(1, -1)).wait()

    def pump(self) -> None:
        with self._changed:
            while self._under_way and all(event.done() for event in self._under_way[0].copies):
                window = self._under_way.popleft()
                self._finish(window)
                self._ready.append(window)
            while self._wanted and self._has_room() and self._error is None:
                self._under_way.append(self._begin(self._next()))
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._error = self._error or BackendError("the copy was given up")
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            while self._under_way:  # a copy still reads the pages
                self._finish(self._under_way.popleft())
            self._ready.clear()
        super().release()

    def _has_room(self) -> bool:
        """Whether what is wanted next may be staged beside what is. A state may be larger than the staging area."""
        windows = [*self._under_way, *self._ready]
        if not windows:
            return True
        staged = sum(rows.nbytes for window in windows for rows in window.rows)
        blocks = self._window_blocks if self._wanted[0] < self._count else 1
        need = blocks * sum(pool.layout.nbytes for pool, _ in self.located(self._wanted[0]))
        return len(windows) < _WINDOWS and staged + need <= STAGING_BYTES

    def _next(self) -> list[int]:
        """What is copied together: some blocks, or a single state."""
        numbers = [self._wanted.popleft()]
        while self._wanted and max(numbers[0], self._wanted[0]) < self._count and len(numbers) < self._window_blocks:
            numbers.append(self._wanted.popleft())
        return numbers

    def _begin(self, numbers: list[int]) -> _Window:
        window = _Window(numbers, [], [])
        for places in zip(*(self.located(number) for number in numbers), strict=True):
            pool = places[0][0]
            rows = np.empty((len(numbers), pool.layout.nbytes), np.uint8)
            window.rows.append(rows)
            try:
                window.copies.append(pool.store.download([page for _, page in places], rows))
            except BackendError as error:
                self._error = error
        return window

    def _finish(self, window: _Window) -> None:
        for event in window.copies:
            try:
                event.wait()
            except BackendError as error:
                self._error = self._error or error


def source_of(pages: HeldPages) -> PageSource:
    """How to read these pages. Called by the engine thread."""
    columns = []
    for pool, table in zip(pages.pools, pages.tables, strict=True):
        views = [pool.store.host_view(page) for page in table]
        present = [view for view in views if view is not None]
        if len(present) < len(views):
            return DevicePages(pages)
        columns.append(present)
    blocks: list[Block] = list(zip(*columns, strict=True))
    if pages.states is not None:
        states = [pages.states.pool.store.host_view(page) for page in pages.states.pages]
        blocks += [(view,) for view in states if view is not None]
    return HostPages(pages, blocks)
