"""Pages in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import Event, PageStore
from strata_core.errors import BackendError
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena, Block


class Completed(Event):
    """The event of a copy that was made during the call that returned it."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@attrs.frozen(eq=False)
class Piece:
    """Pages of one chunk that follow each other in a page table.

    :ivar first: number of the first of them, counted from the first page asked for.
    :ivar pages: where they are in the chunk: a slice if they also follow each other there, an index array otherwise.
    """

    first: int
    count: int
    chunk: int
    pages: slice | NDArray[np.intp]


@attrs.frozen(eq=False)
class _Chunk:
    """``rows`` is uint8 ``(chunk_pages, layout.nbytes)``; ``views[layer][part]`` are its parts in their dtypes."""

    block: Block
    rows: NDArray[np.uint8]
    views: tuple[tuple[NDArray[Any], ...], ...]


class NumpyPageStore(PageStore):
    """Page store whose chunks are blocks of a host arena; copies are complete when the call returns."""

    def __init__(self, layout: PageLayout, chunk_pages: int, arena: Arena):
        self.layout = layout
        self.chunk_pages = chunk_pages
        self._arena = arena
        self._chunks: dict[int, _Chunk] = {}

    def add_chunk(self, chunk: int) -> None:
        if chunk in self._chunks:
            raise BackendError(f"chunk {chunk} of the {self.layout.kind} pages is already there")
        block = self._arena.allocate(self.chunk_pages * self.layout.nbytes)
        rows = block.array[: self.chunk_pages * self.layout.nbytes].reshape(self.chunk_pages, self.layout.nbytes)
        views = tuple(
            tuple(self.layout.view(rows, layer, part) for part in range(len(parts)))
            for layer, parts in enumerate(self.layout.layers)
        )
        self._chunks[chunk] = _Chunk(block, rows, views)

    def drop_chunk(self, chunk: int) -> None:
        block = self._chunk(chunk).block
        del self._chunks[chunk]  # with its views: a block that is still viewed cannot be given back
        block.close()

    def copy(self, source: int, target: int) -> None:
        self._page(target)[:] = self._page(source)

    def download(self, pages: Sequence[int], target: np.ndarray) -> Event:
        for row, page in zip(target, pages, strict=True):
            row[:] = self._page(page)
        return Completed()

    def upload(self, source: np.ndarray, pages: Sequence[int]) -> Event:
        for row, page in zip(source, pages, strict=True):
            self._page(page)[:] = row
        return Completed()

    def host_view(self, page: int) -> np.ndarray | None:
        return self._page(page)

    def close(self) -> None:
        for chunk in list(self._chunks):
            self.drop_chunk(chunk)

    def pieces(self, table: np.ndarray, first: int, stop: int) -> tuple[Piece, ...]:
        """Entries ``first .. stop - 1`` of a page table, grouped so that one numpy operation reaches each group."""
        pages = np.asarray(table[first:stop], dtype=np.intp)
        chunks, local = np.divmod(pages, self.chunk_pages)
        cuts = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(pages)]
        pieces = []
        for a, b in pairwise(cuts):
            where: slice | NDArray[np.intp] = local[a:b]
            if (np.diff(local[a:b]) == 1).all():
                where = slice(int(local[a]), int(local[a]) + b - a)
            pieces.append(Piece(a, b - a, int(chunks[a]), where))
        return tuple(pieces)

    def part(self, chunk: int, layer: int, part: int) -> NDArray[Any]:
        """View ``(chunk_pages, heads, page_tokens, width)`` of one part of one layer in all pages of a chunk."""
        return self._chunk(chunk).views[layer][part]

    def rows(self, chunk: int) -> NDArray[np.uint8]:
        """View ``(chunk_pages, layout.nbytes)`` of all pages of a chunk."""
        return self._chunk(chunk).rows

    def _chunk(self, chunk: int) -> _Chunk:
        try:
            return self._chunks[chunk]
        except KeyError:
            raise BackendError(f"chunk {chunk} of the {self.layout.kind} pages is not there") from None

    def _page(self, page: int) -> NDArray[np.uint8]:
        row: NDArray[np.uint8] = self._chunk(page // self.chunk_pages).rows[page % self.chunk_pages]
        return row
