"""Fresh pages that a level fills during a restore.

A restore never touches pages that anyone uses: it fills new ones, and the slot's table is switched only when all of
them are there and verified. Until then a failure costs nothing but the fresh pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata_core.compute.base import Event
from strata_core.errors import BackendError, LevelError
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages


class PageSink:
    """Room for the pages of the first ``tokens`` positions of a sequence.

    For every block ``0 .. blocks - 1`` a level either fills :meth:`buffers` and calls :meth:`filled`, or calls
    :meth:`put` with memory it keeps unchanged until the restore ends. Then the caller takes the pages with
    :meth:`finish`, or calls :meth:`discard`.

    :raises OutOfMemory: the pools have no room; nothing is held.
    """

    def __init__(self, pools: Sequence[PagePool], tokens: int):
        self.pools = tuple(pools)
        self.tokens = tokens
        self.blocks = pools[0].layout.pages_for(tokens)
        self._tables: list[list[int]] = [[] for _ in pools]
        self._staged: dict[int, tuple[np.ndarray, ...]] = {}
        self._uploads: list[tuple[Event, np.ndarray]] = []  # under way, with the memory they read
        self._missing = set(range(self.blocks))
        try:
            for pool, table in zip(self.pools, self._tables, strict=True):
                for _ in range(self.blocks):
                    table.append(pool.allocate())
        except BaseException:
            self._release()
            raise

    def buffers(self, block: int) -> tuple[np.ndarray, ...]:
        """Where the bytes of a block go: one uint8 array ``(layout.nbytes,)`` per pool. The page itself where it is in
        host memory, else a staging buffer."""
        views = [pool.store.host_view(table[block]) for pool, table in zip(self.pools, self._tables, strict=True)]
        direct = [view for view in views if view is not None]
        if len(direct) == len(views):
            return tuple(direct)
        return self._staged.setdefault(block, tuple(np.empty(pool.layout.nbytes, np.uint8) for pool in self.pools))

    def filled(self, block: int) -> None:
        """The block's buffers hold its verified content."""
        staged = self._staged.pop(block, None)
        if staged is not None:
            self.put(block, staged)
        self._missing.discard(block)

    def put(self, block: int, sources: Sequence[np.ndarray]) -> None:
        """Take a block from host memory, which stays as it is until :meth:`finish` or :meth:`discard`."""
        for pool, table, source in zip(self.pools, self._tables, sources, strict=True):
            self._uploads.append((pool.store.upload(source.reshape(1, -1), [table[block]]), source))
        self._missing.discard(block)

    def finish(self) -> HeldPages:
        """The filled pages, held once for the caller.

        :raises LevelError: a block was never filled, or not copied; everything is given back.
        """
        try:
            failed = self._settle()
            if failed is not None:
                raise LevelError(f"pages were not copied: {failed}") from failed
            if self._missing:
                raise LevelError(f"{len(self._missing)} of {self.blocks} blocks were not delivered")
            return HeldPages(self.pools, self._tables, self.tokens)
        finally:
            self._release()

    def discard(self) -> None:
        """Give the pages back."""
        self._settle()
        self._release()

    def _settle(self) -> BackendError | None:
        """Wait for all uploads, failed ones too: their pages must not be free while one still writes. Returns the
        first failure."""
        failed = None
        for event, _ in self._uploads:
            try:
                event.wait()
            except BackendError as error:
                failed = failed or error
        self._uploads.clear()
        return failed

    def _release(self) -> None:
        for pool, table in zip(self.pools, self._tables, strict=True):
            for page in table:
                pool.release(page)
            table.clear()
