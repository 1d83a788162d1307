"""Paged attention in numpy.

Scores and sums are float32; the softmax subtracts each row's largest score first. One row of a sequence attends the
pages where they lie (:func:`_attend_row`), several rows the keys and values gathered per head and a block of rows at a
time (:func:`_attend_rows`), so that the scores of a long prompt never exist all at once.

Rows of a page beyond the sequence's end hold undefined bytes. They never enter a product: zero times NaN is NaN.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Span
from strata_core.compute.reference.kv import Floats, decode, encode
from strata_core.compute.reference.pages import NumpyPageStore, Piece

#: Scores held at a time: about 2 MiB, what a core's second-level cache holds.
_SCORES = 512 * 1024

K, V = 0, 1


class Scratch:
    """Buffers that keep their memory from call to call: fresh ones cost more in page faults than the arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, Floats] = {}

    def take(self, name: str, *shape: int) -> Floats:
        """A float32 array of this shape, contents undefined; valid until the name is taken again."""
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)


@attrs.frozen(eq=False)
class SpanPages:
    """Where a span's K/V are, the same for all layers of one layout.

    :ivar low: the first position that any of its rows attends; ``first`` is the page that holds it.
    :ivar pieces: the pages from ``first`` to the one of the span's last position.
    """

    low: int
    first: int
    count: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, span: Span, layout: int, store: NumpyPageStore, window: int | None) -> SpanPages:
        size = store.layout.page_tokens
        low = 0 if window is None else max(0, span.start - window + 1)
        first, stop = low // size, (span.start + span.rows - 1) // size + 1
        return cls(low, first, stop - first, store.pieces(span.tables[layout], first, stop))


def write_rows(store: NumpyPageStore, layer: int, span: Span, table: np.ndarray, part: int, rows: Floats) -> None:
    """Put one part (:data:`K` or :data:`V`) of a span's rows, ``(rows, kv_heads, width)``, into its pages."""
    stored, scales = encode(store.layout.kv_type, rows)
    size, position, row = store.layout.page_tokens, span.start, 0
    while row < span.rows:
        chunk, page = divmod(int(table[position // size]), store.chunk_pages)
        at = position % size
        n = min(size - at, span.rows - row)
        store.part(chunk, layer, part)[page, :, at : at + n] = stored[row : row + n].swapaxes(0, 1)
        if scales is not None:
            store.part(chunk, layer, part + 2)[page, :, at : at + n] = scales[row : row + n].swapaxes(0, 1)
        position, row = position + n, row + n


def attend(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    where: SpanPages,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    scratch: Scratch,
) -> None:
    """Attention of one span, whose own K/V are already in its pages.

    :param q: ``(rows, heads, head_dim)``; :param out: ``(rows, heads, value_dim)``, overwritten.
    """
    if span.rows == 1:
        _attend_row(store, layer, span, where, q[0], out[0], spec, scratch)
    else:
        _attend_rows(store, layer, span, where, q, out, spec, scratch)


def _attend_row(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    where: SpanPages,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    scratch: Scratch,
) -> None:
    """One row, page by page: arrays are ``(pages, kv_heads, group or page_tokens, width)``."""
    group, size = spec.heads // spec.kv_heads, store.layout.page_tokens
    keys, values = (_in_pages(store, layer, part, where, scratch) for part in (K, V))
    tail = span.start % size + 1  # rows in use of the last page
    query = (q * np.float32(spec.scale)).reshape(spec.kv_heads, group, spec.head_dim)
    scores = scratch.take("scores", where.count, spec.kv_heads, group, size)
    if where.count > 1:
        np.matmul(query, keys[:-1].swapaxes(2, 3), out=scores[:-1])
    scores[-1, :, :, :tail] = query @ keys[-1, :, :tail].swapaxes(1, 2)
    if spec.softcap is not None:
        _cap(scores, spec.softcap)
    scores[-1, :, :, tail:] = -np.inf
    scores[0, :, :, : where.low % size] = -np.inf
    scores -= scores.max(axis=(0, 3), keepdims=True)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=(0, 3))
    result = scores[-1, :, :, :tail] @ values[-1, :, :tail]
    if where.count > 1:
        result += np.matmul(scores[:-1], values[:-1]).sum(axis=0)
    result /= sums[:, :, None]
    out[:] = result.reshape(spec.heads, spec.value_dim)


def _attend_rows(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    where: SpanPages,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    scratch: Scratch,
) -> None:
    """Several rows: arrays are ``(kv_heads, group * rows, ...)``, keys and values ``(kv_heads, positions, width)``."""
    heads, group = spec.kv_heads, spec.heads // spec.kv_heads
    base = where.first * store.layout.page_tokens  # position of the first gathered row
    keys, values = (_by_head(store, layer, part, where, scratch) for part in (K, V))
    end = span.start + span.rows
    block = max(1, min(span.rows, _SCORES // (spec.heads * (end - base))))
    for a in range(0, span.rows, block):
        b = min(a + block, span.rows)
        n, position = b - a, span.start + a
        low = 0 if spec.window is None else max(0, position - spec.window + 1)
        seen = slice(low - base, position + n - base)
        query = scratch.take("query", heads, group, n, spec.head_dim)
        rows = q[a:b].reshape(n, heads, group, spec.head_dim).transpose(1, 2, 0, 3)
        np.multiply(rows, np.float32(spec.scale), out=query)
        scores = scratch.take("scores", heads, group * n, seen.stop - seen.start)
        np.matmul(query.reshape(heads, group * n, spec.head_dim), keys[:, seen].swapaxes(1, 2), out=scores)
        if spec.softcap is not None:
            _cap(scores, spec.softcap)
        _mask(scores.reshape(heads, group, n, -1), position, low, spec.window)
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=2, keepdims=True)
        result = scores @ values[:, seen]
        result /= sums
        blocks = result.reshape(heads, group, n, spec.value_dim).transpose(2, 0, 1, 3)
        out[a:b] = blocks.reshape(n, spec.heads, spec.value_dim)


def _cap(scores: Floats, softcap: float) -> None:
    scores /= np.float32(softcap)
    np.tanh(scores, out=scores)
    scores *= np.float32(softcap)


def _mask(scores: Floats, position: int, low: int, window: int | None) -> None:
    """Hide from ``scores`` ``(kv_heads, group, rows, positions)`` what a row must not see.

    Row ``i`` is at ``position + i``, column ``j`` at ``low + j``. Only the last ``rows`` columns hold positions after
    some row's own, and only the first ``rows`` columns can lie before some row's window.
    """
    n = scores.shape[2]
    if n == 1:
        return
    later: NDArray[np.bool_] = np.triu(np.ones((n, n), bool), 1)
    np.copyto(scores[..., -n:], -np.inf, where=later)
    if window is not None:
        rows, columns = np.arange(position, position + n)[:, None], np.arange(low, low + n)
        np.copyto(scores[..., :n], -np.inf, where=columns <= rows - window)


def _in_pages(store: NumpyPageStore, layer: int, part: int, where: SpanPages, scratch: Scratch) -> Floats:
    """``(pages, kv_heads, page_tokens, width)`` float32: the pages' own memory where that is possible, else a copy."""
    if store.layout.kv_type == "f32" and len(where.pieces) == 1 and isinstance(where.pieces[0].pages, slice):
        piece = where.pieces[0]
        view: Floats = store.part(piece.chunk, layer, part)[piece.pages]
        return view
    shape = store.layout.layers[layer][part]
    out = scratch.take("kv"[part], where.count, shape.heads, store.layout.page_tokens, shape.width)
    _gather(store, layer, part, where, out)
    return out


def _by_head(store: NumpyPageStore, layer: int, part: int, where: SpanPages, scratch: Scratch) -> Floats:
    """``(kv_heads, positions, width)`` float32, a copy; the last page's undefined rows are included."""
    shape, size = store.layout.layers[layer][part], store.layout.page_tokens
    out = scratch.take("kv"[part], shape.heads, where.count, size, shape.width)
    _gather(store, layer, part, where, out.swapaxes(0, 1))
    return out.reshape(shape.heads, where.count * size, shape.width)


def _gather(store: NumpyPageStore, layer: int, part: int, where: SpanPages, out: Floats) -> None:
    """Decode one part of the pages into ``out`` ``(pages, kv_heads, page_tokens, width)``, of any strides."""
    scaled = len(store.layout.layers[layer]) > 2
    for piece in where.pieces:
        stored = store.part(piece.chunk, layer, part)[piece.pages]
        scales = store.part(piece.chunk, layer, part + 2)[piece.pages] if scaled else None
        decode(store.layout.kv_type, stored, scales, out[piece.first : piece.first + piece.count])
