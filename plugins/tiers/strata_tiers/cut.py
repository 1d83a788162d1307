"""Where a conversation is cut into segments. Pure; the rules are in ``docs/format.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import attrs

from strata_core.store.base import Entry
from strata_tiers.layout import Piece, Shape, next_address


@attrs.frozen
class Limits:
    """:ivar split_bytes: least bytes of a part that ends at an intermediate opener.
    :ivar max_bytes: :ivar max_tokens: most that a segment holds.
    """

    split_bytes: int = 8 << 20
    max_bytes: int = 64 << 20
    max_tokens: int = 2048

    def most(self, shape: Shape) -> int:
        """Most positions of a segment, a positive multiple of the page."""
        blocks = min(self.max_tokens // shape.page_tokens, self.max_bytes // shape.block_bytes)
        return max(1, blocks) * shape.page_tokens


def cut(start: int, stop: int, turns: Iterable[int], shape: Shape, limits: Limits, prefix: int = 0) -> list[int]:
    """Ends of the segments that hold positions ``[start, stop)``, ascending.

    :param start: a page boundary.
    :param turns: positions of openers in the whole sequence. :param prefix: tokens that other sequences share.
    """
    page = shape.page_tokens
    fronts = sorted({turn - turn % page for turn in turns if page <= turn < stop})
    edges = {stop, stop - stop % page, *fronts[:1], *fronts[-1:], min(prefix - prefix % page, stop)}
    ends, at = [], start
    for edge in sorted(edge for edge in edges if edge > start):
        for front in fronts:
            if at < front < edge and (front - at) // page * shape.block_bytes >= limits.split_bytes:
                ends += _steps(at, front, limits.most(shape))
                at = front
        ends += _steps(at, edge, limits.most(shape))
        at = edge
    return ends


def plan(
    entry: Entry, shape: Shape, limits: Limits, known: Callable[[bytes], Iterable[Piece]]
) -> Sequence[Piece]:
    """The segments of an entry: those that exist as far as they go, then new ones; then its states.

    :param known: existing segments whose parent address is the given one.
    """
    page, pieces = shape.page_tokens, list[Piece]()
    at, address = 0, entry.identity
    while True:
        longest = None
        for piece in known(address):
            whole = not piece.owner and not piece.state
            fits = whole and piece.start == at and piece.stop // page <= len(entry.addresses)
            if fits and piece.address == entry.addresses[piece.stop // page - 1]:
                longest = piece if longest is None or piece.count > longest.count else longest
        if longest is None:
            break
        pieces.append(longest)
        at, address = longest.stop, longest.address
    for first, stop in pairwise([at, *cut(at, len(entry.tokens), entry.turns, shape, limits, entry.prefix)]):
        whole, end = stop % page == 0, _end(entry, stop, page)
        count = stop - first
        pieces.append(Piece(address, end, first, count, shape.segment_bytes(count), "" if whole else entry.id))
        address = end
    return pieces + states(entry, shape)


def states(entry: Entry, shape: Shape) -> list[Piece]:
    """The states of an entry, ascending. One at a page boundary is named after what it is the state of, and shared."""
    pieces = []
    for position in entry.states or ():
        address = _end(entry, position, shape.page_tokens)
        owner = entry.id if position % shape.page_tokens else ""
        size = Shape(1, (shape.state_bytes,)).segment_bytes(1)
        pieces.append(Piece(address, address, position - 1, 1, size, owner, state=True))
    return pieces


def _steps(at: int, stop: int, most: int) -> list[int]:
    return [*range(at + most, stop, most), stop]


def _end(entry: Entry, stop: int, page: int) -> bytes:
    """Address of what ends at a position, at the end of a page or within one."""
    begin = stop - stop % page
    parent = entry.addresses[begin // page - 1] if begin else entry.identity
    return parent if begin == stop else next_address(parent, entry.tokens[begin:stop])
