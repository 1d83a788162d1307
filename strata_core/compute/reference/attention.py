"""Paged attention in numpy.

Scores and sums are float32; the softmax subtracts each row's largest score first. One row of a sequence attends the
pages where they lie (:func:`_attend_row`), several rows the keys and values gathered per head and a block of rows at a
time (:func:`_attend_rows`), so that the scores of a long prompt never exist all at once.

Rows of a page beyond the sequence's end hold undefined bytes. They never enter a product: zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Batch, Span
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


class StepPages:
    """Where the K/V of a step's spans are, worked out once for each layout and window and used by every layer."""

    def __init__(self, batch: Batch, stores: Sequence[NumpyPageStore]):
        self._batch, self._stores = batch, stores
        self._known: dict[tuple[int, int | None], list[SpanPages]] = {}

    def of(self, layout: int, window: int | None) -> list[SpanPages]:
        """One for each span."""
        key = layout, window
        if key not in self._known:
            store = self._stores[layout]
            self._known[key] = [SpanPages.of(s, layout, store, window) for s in self._batch.spans]
        return self._known[key]


def attend_batch(
    batch: Batch,
    store: NumpyPageStore,
    pages: Sequence[SpanPages],
    layer: tuple[int, int],
    q: Floats,
    k: Floats,
    v: Floats | None,
    spec: AttentionSpec,
    sinks: Floats | None,
    scratch: Scratch,
) -> Floats:
    """:meth:`strata_core.compute.base.Backend.attention` of all spans; ``store`` is the one of ``layer``."""
    (layout, number), rows = layer, batch.rows
    q = q.reshape(rows, spec.heads, spec.head_dim)
    parts = [(K, k.reshape(rows, spec.kv_heads, spec.head_dim))]
    if v is not None:
        parts.append((V, v.reshape(rows, spec.kv_heads, spec.value_dim)))
    out = np.empty((rows, spec.heads, spec.value_dim), np.float32)
    start = 0
    for span, where in zip(batch.spans, pages, strict=True):
        own = slice(start, start + span.rows)
        for part, values in parts:
            write_rows(store, number, span, span.tables[layout], part, values[own])
        attend(store, number, span, where, q[own], out[own], spec, sinks, scratch)
        start += span.rows
    return out.reshape(rows, spec.heads * spec.value_dim)


def write_rows(store: NumpyPageStore, layer: int, span: Span, table: np.ndarray, part: int, rows: Floats) -> None:
    """Put one part (:data:`K` or :data:`V`) of a span's rows, ``(rows, kv_heads, width)``, into its pages."""
    stored, scales = encode(store.layout.kv_type, rows)
    scale_part = scales_of(store, layer, part)
    size, position, row = store.layout.page_tokens, span.start, 0
    while row < span.rows:
        chunk, page = divmod(int(table[position // size]), store.chunk_pages)
        at = position % size
        n = min(size - at, span.rows - row)
        store.part(chunk, layer, part)[page, :, at : at + n] = stored[row : row + n].swapaxes(0, 1)
        if scale_part is not None and scales is not None:
            store.part(chunk, layer, scale_part)[page, :, at : at + n] = scales[row : row + n].swapaxes(0, 1)
        position, row = position + n, row + n


def attend(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    where: SpanPages,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    sinks: Floats | None,
    scratch: Scratch,
) -> None:
    """Attention of one span, whose own K/V are already in its pages.

    :param q: ``(rows, heads, head_dim)``; :param out: ``(rows, heads, value_dim)``, overwritten.
    """
    if span.rows == 1:
        _attend_row(store, layer, span, where, q[0], out[0], spec, sinks, scratch)
    else:
        _attend_rows(store, layer, span, where, q, out, spec, sinks, scratch)


def _attend_row(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    where: SpanPages,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    sinks: Floats | None,
    scratch: Scratch,
) -> None:
    """One row, page by page: arrays are ``(pages, kv_heads, group or page_tokens, width)``."""
    group, size = spec.heads // spec.kv_heads, store.layout.page_tokens
    keys = _in_pages(store, layer, K, where, scratch)
    values = keys[..., : spec.value_dim] if spec.latent else _in_pages(store, layer, V, where, scratch)
    tail = span.start % size + 1  # rows in use of the last page
    query = (q * np.float32(spec.scale)).reshape(spec.kv_heads, group, spec.head_dim)
    scores = scratch.take("scores", where.count, spec.kv_heads, group, size)
    if where.count > 1:
        np.matmul(query, keys[:-1].swapaxes(2, 3), out=scores[:-1])
    scores[-1, :, :, :tail] = query @ keys[-1, :, :tail].swapaxes(1, 2)
    if spec.softcap is not None:
        cap(scores, spec.softcap)
    scores[-1, :, :, tail:] = -np.inf
    scores[0, :, :, : where.low % size] = -np.inf
    highest = scores.max(axis=(0, 3), keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, spec.kv_heads, group, 1)
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    sums = scores.sum(axis=(0, 3))
    if sinks is not None:
        sums += np.exp(sinks - highest)[0, :, :, 0]
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
    sinks: Floats | None,
    scratch: Scratch,
) -> None:
    """Several rows: arrays are ``(kv_heads, group * rows, ...)``, keys and values ``(kv_heads, positions, width)``."""
    heads, group = spec.kv_heads, spec.heads // spec.kv_heads
    base = where.first * store.layout.page_tokens  # position of the first gathered row
    keys = by_head(store, layer, K, where, scratch)
    values = keys[..., : spec.value_dim] if spec.latent else by_head(store, layer, V, where, scratch)
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
            cap(scores, spec.softcap)
        _mask(scores.reshape(heads, group, n, -1), position, low, spec.window)
        highest = scores.max(axis=2, keepdims=True)
        if sinks is not None:
            rests = np.repeat(sinks.reshape(heads, group), n, axis=1)[:, :, None]
            highest = np.maximum(highest, rests)
        scores -= highest
        np.exp(scores, out=scores)
        sums = scores.sum(axis=2, keepdims=True)
        if sinks is not None:
            sums += np.exp(rests - highest)
        result = scores @ values[:, seen]
        result /= sums
        blocks = result.reshape(heads, group, n, spec.value_dim).transpose(2, 0, 1, 3)
        out[a:b] = blocks.reshape(n, spec.heads, spec.value_dim)


def cap(scores: Floats, softcap: float) -> None:
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


def by_head(store: NumpyPageStore, layer: int, part: int, where: SpanPages, scratch: Scratch) -> Floats:
    """``(kv_heads, positions, width)`` float32, a copy; the last page's undefined rows are included."""
    shape, size = store.layout.layers[layer][part], store.layout.page_tokens
    out = scratch.take("kv"[part], shape.heads, where.count, size, shape.width)
    _gather(store, layer, part, where, out.swapaxes(0, 1))
    return out.reshape(shape.heads, where.count * size, shape.width)


def _gather(store: NumpyPageStore, layer: int, part: int, where: SpanPages, out: Floats) -> None:
    """Decode one part of the pages into ``out`` ``(pages, kv_heads, page_tokens, width)``, of any strides."""
    scale_part = scales_of(store, layer, part)
    for piece in where.pieces:
        stored = store.part(piece.chunk, layer, part)[piece.pages]
        scales = None if scale_part is None else store.part(piece.chunk, layer, scale_part)[piece.pages]
        decode(store.layout.kv_type, stored, scales, out[piece.first : piece.first + piece.count])


def scales_of(store: NumpyPageStore, layer: int, part: int) -> int | None:
    """The number of the part that holds the scales of another; None where its type needs none."""
    names = [p.name for p in store.layout.layers[layer]]
    scales = f"{names[part]}_scale"
    return names.index(scales) if scales in names else None
