"""A sink for pages that are read only to see whether they are sound: they are dropped when they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from strata_core.errors import LevelError
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import STAGING_BYTES, PageSink


class CheckingSink(PageSink):
    """Takes pages as a :class:`PageSink` does, without room in the pools. Any thread; :meth:`complete` ends it."""

    def __init__(
        self, pools: Sequence[PagePool], tokens: int, states: tuple[PagePool, Sequence[int]] | None = None
    ):
        self.pools = tuple(pools)
        self.tokens = tokens
        self.blocks = pools[0].layout.pages_for(tokens)
        self.states = () if states is None else tuple(states[1])
        self._state_pool = None if states is None else states[0]
        self._lock = threading.Lock()
        self._missing = set(range(self.blocks + len(self.states)))
        self._handed: dict[int, tuple[np.ndarray, ...]] = {}

    @property
    def at_once(self) -> int:
        return max(1, STAGING_BYTES // sum(pool.layout.nbytes for pool in self.pools))

    @property
    def states_at_once(self) -> int:
        return 1

    def buffers(self, block: int) -> tuple[np.ndarray, ...]:
        pools = self.pools if block < self.blocks or self._state_pool is None else (self._state_pool,)
        made = tuple(np.empty(pool.layout.nbytes, np.uint8) for pool in pools)
        with self._lock:
            return self._handed.setdefault(block, made)

    def filled(self, block: int) -> None:
        with self._lock:
            self._handed.pop(block, None)
            self._missing.discard(block)

    def put(self, block: int, sources: Sequence[np.ndarray]) -> None:
        self.filled(block)

    def complete(self) -> None:
        """:raises LevelError: a block was never delivered."""
        if self._missing:
            raise LevelError(f"{len(self._missing)} of {self.blocks + len(self.states)} blocks were not delivered")
