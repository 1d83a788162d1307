"""Fresh pages that a level fills during a restore.

A restore never touches pages that anyone uses: it fills new ones, and the slot's table is switched only when all of
them are there and verified. Until then a failure costs nothing but the fresh pages.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from strata_core.compute.base import Event
from strata_core.errors import BackendError, LevelError
from strata_core.pool.pool import PagePool
from strata_core.pool.states import HeldStates
from strata_core.pool.table import HeldPages

#: Host memory that blocks on their way to a device may take.
STAGING_BYTES = 32 << 20


class PageSink:
    """Room for the pages of the first ``tokens`` positions of a sequence.

    For every block ``0 .. blocks - 1`` a level either fills :meth:`buffers` and calls :meth:`filled`, or calls
    :meth:`put` with memory it keeps unchanged until the restore ends. Then the caller takes the pages with
    :meth:`finish`, or calls :meth:`discard`.

    :meth:`buffers` and :meth:`filled` may be called on another thread than the engine's; the engine then calls
    :meth:`pump` now and then, which copies what was filled to the device, and may :meth:`cancel`.

    States are delivered like blocks, under the numbers that :meth:`state` gives them.

    :param states: for models with recurrent state, the state pool and the positions whose states are wanted too.
    :raises OutOfMemory: the pools have no room; nothing is held.
    """

    def __init__(
        self, pools: Sequence[PagePool], tokens: int, states: tuple[PagePool, Sequence[int]] | None = None
    ):
        self.pools = tuple(pools)
        self.tokens = tokens
        self.blocks = pools[0].layout.pages_for(tokens)
        self.states = () if states is None else tuple(states[1])
        self._state_pool = None if states is None else states[0]
        self._state_pages: list[int] = []
        self._tables: list[list[int]] = [[] for _ in pools]
        self._owner = threading.get_ident()
        self._changed = threading.Condition()
        self._cancelled = False
        self._staged: dict[int, tuple[np.ndarray, ...]] = {}  # handed out, and not uploaded yet
        self._ready: list[int] = []  # staged and filled
        self._uploads: list[tuple[Event, np.ndarray]] = []  # under way, with the memory they read
        self._failed: BackendError | None = None
        self._missing = set(range(self.blocks + len(self.states)))
        block_bytes = sum(pool.layout.nbytes for pool in pools)
        self._most_staged = max(1, STAGING_BYTES // block_bytes)
        try:
            for pool, table in zip(self.pools, self._tables, strict=True):
                for _ in range(self.blocks):
                    table.append(pool.allocate())
            if self._state_pool is not None:
                for _ in self.states:
                    self._state_pages.append(self._state_pool.allocate())
        except BaseException:
            self._release()
            raise

    def state(self, position: int) -> int:
        """The number of the block that the state at a position is, one of :attr:`states`."""
        return self.blocks + self.states.index(position)

    def _pages(self, block: int) -> list[tuple[PagePool, int]]:
        if block < self.blocks:
            return [(pool, table[block]) for pool, table in zip(self.pools, self._tables, strict=True)]
        assert self._state_pool is not None
        return [(self._state_pool, self._state_pages[block - self.blocks])]

    @property
    def at_once(self) -> int:
        """For how many blocks :meth:`buffers` may be asked before one of them is filled: all of them where these are
        the pages themselves, else as many as may be on their way to the device, at least 1."""
        return self.blocks if self._direct(0) else self._most_staged

    @property
    def states_at_once(self) -> int:
        """The same for states, of which a single one may take more than the staging area."""
        return len(self.states) if self.states and self._direct(self.blocks) else 1

    def _direct(self, block: int) -> bool:
        return all(pool.store.host_view(page) is not None for pool, page in self._pages(block))

    def buffers(self, block: int) -> tuple[np.ndarray, ...]:
        """Where the bytes of a block go: one uint8 array ``(layout.nbytes,)`` per pool, or one for a state. The page
        itself where it is in host memory, else a staging buffer; waits while there are too many of these.

        :raises LevelError: the restore was cancelled.
        """
        if self._cancelled:
            raise LevelError("the restore was cancelled")
        views = [pool.store.host_view(page) for pool, page in self._pages(block)]
        direct = [view for view in views if view is not None]
        if len(direct) == len(views):
            return tuple(direct)
        with self._changed:
            need = sum(pool.layout.nbytes for pool, _ in self._pages(block))
            while block not in self._staged and 0 < self._staging() > STAGING_BYTES - need:
                if self._on_engine():
                    if not self._uploads:
                        raise LevelError(f"{len(self._staged)} blocks were asked for and not filled")
                    self._complete(self._uploads.pop(0)[0])
                    continue
                self._changed.wait()
                if self._cancelled:
                    raise LevelError("the restore was cancelled")
            fresh = tuple(np.empty(pool.layout.nbytes, np.uint8) for pool, _ in self._pages(block))
            return self._staged.setdefault(block, fresh)

    def filled(self, block: int) -> None:
        """The block's buffers hold its verified content."""
        with self._changed:
            if block in self._staged:
                self._ready.append(block)
            else:
                self._missing.discard(block)
        if self._on_engine():
            self.pump()

    def pump(self) -> None:
        """Engine thread: send filled staging buffers on to the device, and let go of those that have arrived."""
        with self._changed:
            ready, self._ready = self._ready, []
            for block in ready:
                self.put(block, self._staged.pop(block))
            under_way = []
            for event, source in self._uploads:
                if event.done():
                    self._complete(event)
                else:
                    under_way.append((event, source))
            self._uploads = under_way
            self._changed.notify_all()

    def cancel(self) -> None:
        """End a restore on another thread early: its next :meth:`buffers` raises."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def put(self, block: int, sources: Sequence[np.ndarray]) -> None:
        """Take a block from host memory, which stays as it is until :meth:`finish` or :meth:`discard`. Engine thread
        only."""
        for (pool, page), source in zip(self._pages(block), sources, strict=True):
            self._uploads.append((pool.store.upload(source.reshape(1, -1), [page]), source))
        self._missing.discard(block)

    def finish(self) -> HeldPages:
        """The filled pages, held once for the caller.

        :raises LevelError: a block was never filled, or not copied; everything is given back.
        """
        try:
            self.pump()
            self._settle()
            if self._failed is not None:
                raise LevelError(f"pages were not copied: {self._failed}") from self._failed
            if self._missing:
                raise LevelError(f"{len(self._missing)} of {self.blocks + len(self.states)} blocks were not delivered")
            states = None
            if self._state_pool is not None:
                states = HeldStates(self._state_pool, self.states, self._state_pages)
            return HeldPages(self.pools, self._tables, self.tokens, states)
        finally:
            self._release()

    def discard(self) -> None:
        """Give the pages back. No thread fills buffers any more."""
        self._settle()
        self._release()

    def _settle(self) -> None:
        """Wait for all uploads, failed ones too: their pages must not be free while one still writes."""
        for event, _ in self._uploads:
            self._complete(event)
        self._uploads.clear()

    def _complete(self, event: Event) -> None:
        try:
            event.wait()
        except BackendError as error:
            self._failed = self._failed or error

    def _staging(self) -> int:
        """Bytes in host memory on their way to the device."""
        handed_out = sum(buffer.nbytes for buffers in self._staged.values() for buffer in buffers)
        return handed_out + sum(source.nbytes for _, source in self._uploads)

    def _on_engine(self) -> bool:
        return threading.get_ident() == self._owner

    def _release(self) -> None:
        for pool, table in zip(self.pools, self._tables, strict=True):
            for page in table:
                pool.release(page)
            table.clear()
        for page in self._state_pages:
            assert self._state_pool is not None
            self._state_pool.release(page)
        self._state_pages.clear()
