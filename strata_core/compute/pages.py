"""Where pages live: a backend's memory of them, and copies between it and the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strata_core.pool.layout import PageLayout


class Event(ABC):
    """Completion of a page copy. May be used from any thread."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy is complete; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the copy is complete.

        :raises BackendError: the copy failed.
        """


class PageStore(ABC):
    """Memory of one pool's pages, in chunks of ``chunk_pages`` pages.

    Page ``p`` lives in chunk ``p // chunk_pages``. Chunks come and go; a page of an absent chunk must not be named.
    New pages hold undefined bytes. While an upload to a page is not done, nothing else may name the page; while a
    download of it is not done, it may only be read; its chunk must not be dropped before either is done.
    """

    layout: PageLayout
    chunk_pages: int

    @abstractmethod
    def add_chunk(self, chunk: int) -> None:
        """Make the pages of chunk number ``chunk`` usable.

        :raises OutOfMemory: the memory is not there; nothing changed.
        """

    @abstractmethod
    def drop_chunk(self, chunk: int) -> None:
        """Give the chunk's memory back to the system."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Copy one page to another, in order with the operations around it."""

    @abstractmethod
    def download(self, pages: Sequence[int], target: np.ndarray) -> Event:
        """Copy pages to host memory: row ``i`` of ``target`` (uint8 ``(n, layout.nbytes)``) receives ``pages[i]``.

        The pages are read as all operations called before leave them. The caller keeps pages and ``target`` untouched
        until the event is done.
        """

    @abstractmethod
    def upload(self, source: np.ndarray, pages: Sequence[int]) -> Event:
        """Copy host memory to pages, the reverse of :meth:`download`.

        The caller names the pages in a step only after the event is done, and keeps ``source`` untouched until then.
        """

    def host_view(self, page: int) -> np.ndarray | None:
        """The page's own memory as a uint8 ``(layout.nbytes,)`` view, where it is the host's; None otherwise."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free all chunks."""
