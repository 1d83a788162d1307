"""Contracts of host memory: how much there is, and who hands it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LargePages: TypeAlias = Literal["off", "auto", "require"]
"""``off``: normal pages. ``auto``: large pages where the system gives them. ``require``: large pages or an error."""


@attrs.frozen
class MemoryState:
    """What this process may use, in bytes; None where it is not known.

    :ivar total: physical memory, or the limit of the container if that is less.
    :ivar available: what can be allocated now without swapping or being killed.
    :ivar source: what gave ``available``, for logs and the status page.
    """

    total: int | None
    available: int | None
    source: str


@attrs.frozen
class LargePagesReport:
    """What an arena's open blocks are made of.

    :ivar mode: what was asked for.
    :ivar large_bytes: bytes that are on large pages now, as the system counts them.
    :ivar normal_bytes: the other bytes of open blocks, touched or not.
    :ivar reasons: why bytes that should have been large are not; each reason once.
    """

    mode: LargePages
    large_bytes: int
    normal_bytes: int
    reasons: tuple[str, ...]


class Block(ABC):
    """A piece of host memory.

    :ivar nbytes: its size as it was asked for.
    """

    nbytes: int

    @property
    @abstractmethod
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 ``(nbytes,)``, writable, starting at a page boundary, zero until written.

        :raises ValueError: the block is closed.
        """

    @property
    @abstractmethod
    def large_bytes(self) -> int:
        """How many of its bytes are on large pages now, as the system counts them. Costs a system query."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back to the system. Closing twice is harmless.

        Views of :attr:`array` that still exist must not be used: their contents are gone.
        """


class Arena(ABC):
    """Hands out large blocks of host memory. Thread-safe."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Block:
        """A new block. Blocks of a multiple of 2 MiB waste nothing with large pages.

        :raises OutOfMemory: the system has no such memory, or large pages are required and not to be had.
        """

    @abstractmethod
    def large_pages_report(self) -> LargePagesReport:
        """What the blocks that are open now are made of."""


@attrs.frozen
class MemoryProvider:
    """What ``strata_register_memory`` registers; registered only where it works.

    :ivar priority: the provider of the highest priority is used (portable 0, the platform's own 10).
    :ivar probe: measures memory now; never raises, answers None for what it cannot know.
    :ivar arena: makes an arena for a large-page mode.
    """

    name: str
    priority: int
    probe: Callable[[], MemoryState] = attrs.field(repr=False)
    arena: Callable[[LargePages], Arena] = attrs.field(repr=False)
