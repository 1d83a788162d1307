"""Recurrent state of a sequence at some of its positions.

A state is one page of the state pool and never changes once a step has written it (see :attr:`Span.state`), so keeping
one is holding its page. :class:`StateTrack` is what a slot has: the state at its end, which every step
exchanges for a new one, and those it keeps on the way. :class:`HeldStates` is an immutable selection of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strata_core.compute.base import NO_STATE
from strata_core.pool.pool import PagePool


def resumable(states: Sequence[int] | None, tokens: int) -> int:
    """The deepest position at or before ``tokens`` that a sequence can be resumed at; 0 for none but its beginning.

    :param states: ascending positions that a state was kept at; None for models without state, resumed anywhere. Pure.
    """
    if states is None:
        return tokens
    return max((position for position in states if position <= tokens), default=0)


class HeldStates:
    """References to the states at ``positions`` (ascending, above 0). The holder calls :meth:`release` once."""

    def __init__(self, pool: PagePool, positions: Iterable[int], pages: Iterable[int]):
        self.pool = pool
        self.positions = tuple(positions)
        self.pages = tuple(pages)
        for page in self.pages:
            pool.retain(page)

    def fork(self, tokens: int) -> HeldStates:
        """Another handle, on the states at positions up to ``tokens``."""
        count = sum(position <= tokens for position in self.positions)
        return HeldStates(self.pool, self.positions[:count], self.pages[:count])

    def page(self, position: int) -> int:
        """The page of the state at a position, which must be one of :attr:`positions`."""
        return self.pages[self.positions.index(position)]

    def release(self) -> None:
        for page in self.pages:
            self.pool.release(page)
        self.positions = self.pages = ()


class StateTrack:
    """The states of a sequence that is being extended.

    :param most: how many states it keeps beside the one at its end; the one used longest ago goes first.
    """

    def __init__(self, pool: PagePool, most: int):
        self.pool = pool
        self._most = most
        self._pages: dict[int, int] = {}  # position -> page, least recently used first
        self._protected: int | None = None
        self._next: int | None = None
        self.end = 0  # the position the next step begins at

    @property
    def positions(self) -> tuple[int, ...]:
        """Ascending positions that there is a state at."""
        return tuple(sorted(self._pages))

    def adopt(self, states: HeldStates, tokens: int) -> None:
        """Begin with the states of another sequence, the first ``tokens`` positions of which were taken over."""
        for position, page in zip(states.positions, states.pages, strict=True):
            if position <= tokens:
                self.pool.retain(page)
                self._pages[position] = page
        self.end = tokens

    def hold(self, tokens: int) -> HeldStates:
        """A handle on the states at positions up to ``tokens``."""
        positions = [position for position in self.positions if position <= tokens]
        return HeldStates(self.pool, positions, [self._pages[position] for position in positions])

    def begin(self) -> tuple[int, int]:
        """The pages that a step reads and writes, as in :attr:`strata_core.compute.base.Span.state`.

        :raises OutOfMemory: there is none to write to.
        """
        if self._next is None:
            self._next = self.pool.allocate()
        return (self._pages[self.end] if self.end else NO_STATE), self._next

    def advance(self, position: int, *, keep: bool) -> None:
        """A step has computed everything before ``position``.

        :param keep: whether the state at the former end stays, as one to come back to.
        """
        assert self._next is not None
        if self.end and not keep:
            self.pool.release(self._pages.pop(self.end))
        self._pages[position] = self._next
        self._next, self.end = None, position
        self._trim()

    def protect(self, position: int) -> None:
        """The state at a position, now or to come, is not given up for others; the one protected before may be."""
        self._protected = position

    def touch(self, position: int) -> None:
        """The state at a position was used: those that were not for longer are given up before it."""
        if position in self._pages:
            self._pages[position] = self._pages.pop(position)

    def truncate(self, tokens: int) -> None:
        """Go back to position ``tokens``: 0, or one there is a state at."""
        for position in [p for p in self._pages if p > tokens]:
            self.pool.release(self._pages.pop(position))
        self.end = tokens
        if self._next is not None:
            self.pool.release(self._next)
            self._next = None

    def _trim(self) -> None:
        spare = [p for p in self._pages if p not in (self.end, self._protected)]
        kept = sum(p != self.end for p in self._pages)
        for position in spare[: max(0, kept - self._most)]:
            self.pool.release(self._pages.pop(position))
