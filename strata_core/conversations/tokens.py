"""Token id arrays: growing, comparing."""

from __future__ import annotations

import numpy as np


class TokenList:
    """A growing list of token ids in one int32 array. ``view()`` is invalidated by the next append."""

    def __init__(self, tokens: np.ndarray | None = None):
        start = np.zeros(0, np.int32) if tokens is None else tokens
        self._buffer = np.array(start, np.int32)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: np.ndarray) -> None:
        needed = self._length + len(tokens)
        if needed > len(self._buffer):
            grown = np.zeros(max(needed, 2 * len(self._buffer), 64), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : needed] = tokens
        self._length = needed

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def view(self) -> np.ndarray:
        """The ids, int32, without copying; read only by convention."""
        return self._buffer[: self._length]

    def frozen(self) -> np.ndarray:
        """An immutable copy."""
        copy: np.ndarray = self.view().copy()
        copy.setflags(write=False)
        return copy


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading elements in which two id arrays agree."""
    n = min(len(a), len(b))
    # Most pairs differ early or not at all; looking at a short head first avoids comparing megabytes for nothing.
    for limit in (64, n):
        end = min(limit, n)
        different = np.flatnonzero(a[:end] != b[:end])
        if len(different):
            return int(different[0])
    return n
