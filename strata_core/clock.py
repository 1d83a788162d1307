"""What time it is, for everything that decides by it."""

from __future__ import annotations

import time


class Clock:
    """The system's clock. The simulator hands in another one, so that the same decisions run in simulated time."""

    def time(self) -> float:
        """Seconds since the epoch: orders uses, and outlasts the process."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some fixed moment, never going back: measures how long things take."""
        return time.perf_counter()
