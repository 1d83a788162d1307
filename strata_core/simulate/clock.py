"""Simulated time: a clock that stands still between events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from strata_core.clock import Clock

#: The epoch of simulated runs. Any would do; a fixed one makes runs repeatable.
EPOCH = 1_700_000_000.0
#: By how much the clock moves each time it is read, so that no two uses are of the same moment.
TICK = 1e-6


class SimClock(Clock):
    """Events in order of time, and the time of the one that is going on.

    :ivar now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._told = EPOCH
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def time(self) -> float:
        self._told = max(self._told + TICK, EPOCH + self.now)
        return self._told

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have ``action`` run at a time; at once when that has passed."""
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def wait_until(self, when: float) -> None:
        """Let time pass while nothing else can happen."""
        self.now = max(self.now, when)

    def step(self, until: float) -> bool:
        """Run the next event. False when there is none before ``until``."""
        if not self._events or self._events[0][0] > until:
            return False
        when, _, action = heapq.heappop(self._events)
        self.now = max(self.now, when)
        action()
        return True
