"""Sparse attention in numpy: an indexer chooses the positions that a row attends.

One row of a sequence gathers the keys and values of what it chose, several rows those of all positions, and hide what a
row did not choose; the index keys of all positions are read in either case.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Backend, Indexer, Rotation, Span
from strata_core.compute.reference import attention
from strata_core.compute.reference.kv import Floats, decode
from strata_core.compute.reference.pages import NumpyPageStore

#: Scores held at a time: about 2 MiB, what a core's second-level cache holds.
_SCORES = 512 * 1024


class HostIndexed(Backend):
    """Steps of backends whose arrays are numpy's have ``batch`` and ``stores``."""

    def indexed_attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Floats,
        k: Floats,
        v: Floats,
        spec: AttentionSpec,
        index_q: Floats,
        index_k: Floats,
        indexer: Indexer,
    ) -> Floats:
        layout, number = layer
        store, rows = step.stores[layout], len(q)
        q = q.reshape(rows, spec.heads, spec.head_dim) * np.float32(spec.scale)
        k = k.reshape(rows, spec.kv_heads, spec.head_dim)
        v = v.reshape(rows, spec.kv_heads, spec.value_dim)
        index_q = index_q.reshape(rows, indexer.heads, indexer.dim)
        out = np.empty((rows, spec.heads, spec.value_dim), np.float32)
        start = 0
        for span in step.batch.spans:
            own, table = slice(start, start + span.rows), span.tables[layout]
            attention.write_rows(store, number, span, table, attention.K, k[own])
            attention.write_rows(store, number, span, table, attention.V, v[own])
            _write_index(store, number, span, table, index_k[own])
            keys = block_keys(store, number, span, table, indexer)
            attend = _attend_row if span.rows == 1 else _attend_rows
            attend(store, number, span, layout, q[own], out[own], spec, index_q[own], keys, indexer)
            start += span.rows
        return out.reshape(rows, -1)


def block_keys(store: NumpyPageStore, layer: int, span: Span, table: np.ndarray, indexer: Indexer) -> Floats:
    """Keys ``(blocks, dim)`` of all blocks that are complete for the span's last row."""
    blocks = (span.start + span.rows) // indexer.block
    part = len(store.layout.layers[layer]) - 1
    rows = _rows(store, layer, part, table, np.arange(blocks * indexer.block))[:, 0].astype(np.float32)
    keys = rows.reshape(blocks, indexer.block, indexer.dim).mean(axis=1, dtype=np.float32)
    keys /= np.sqrt((keys * keys).mean(axis=1, keepdims=True) + np.float32(indexer.eps))
    keys *= indexer.key_norm
    return _rotated(keys, np.arange(blocks) * indexer.block, indexer.rotation)


def chosen_blocks(index_q: Floats, keys: Floats, start: int, indexer: Indexer) -> NDArray[np.bool_]:
    """Which blocks rows at positions ``start ..`` attend: ``(rows, blocks)``.

    :param index_q: ``(rows, heads, dim)``; :param keys: ``(blocks, dim)``.
    """
    rows, blocks = len(index_q), len(keys)
    complete = (np.arange(start, start + rows) + 1) // indexer.block
    seen: NDArray[np.bool_] = np.arange(blocks) < complete[:, None]
    if blocks <= indexer.top:
        return seen
    scores = np.maximum(index_q.reshape(-1, indexer.dim) @ keys.T, 0).reshape(rows, indexer.heads, blocks).sum(axis=1)
    scores /= np.float32(np.sqrt(indexer.dim))
    scores[~seen] = -np.inf
    # A stable sort of the negated scores: among equals the earlier block comes first.
    best = np.argsort(-scores, axis=1, kind="stable")[:, : indexer.top]
    chosen = np.zeros_like(seen)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen & seen


def _attend_row(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    layout: int,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    index_q: Floats,
    keys: Floats,
    indexer: Indexer,
) -> None:
    chosen = np.flatnonzero(chosen_blocks(index_q, keys, span.start, indexer)[0])
    inside = (chosen[:, None] * indexer.block + np.arange(indexer.block)).reshape(-1)
    positions = np.concatenate([inside, np.arange(len(keys) * indexer.block, span.start + 1)])
    table = span.tables[layout]
    k, v = (_heads(store, layer, part, table, positions) for part in (attention.K, attention.V))
    query = q.reshape(spec.kv_heads, -1, spec.head_dim)
    scores = query @ k.swapaxes(1, 2)
    out[:] = _weighted(scores, v, spec).reshape(out.shape)


def _attend_rows(
    store: NumpyPageStore,
    layer: int,
    span: Span,
    layout: int,
    q: Floats,
    out: Floats,
    spec: AttentionSpec,
    index_q: Floats,
    keys: Floats,
    indexer: Indexer,
) -> None:
    heads, group, end = spec.kv_heads, spec.heads // spec.kv_heads, span.start + span.rows
    where = attention.SpanPages.of(span, layout, store, None)
    scratch = attention.Scratch()
    k, v = (attention.by_head(store, layer, part, where, scratch) for part in (attention.K, attention.V))
    size = max(1, _SCORES // (max(spec.heads, indexer.heads) * end))
    for a in range(0, span.rows, size):
        b = min(a + size, span.rows)
        n, stop = b - a, span.start + b
        query = q[a:b].reshape(n, heads, group, spec.head_dim).transpose(1, 2, 0, 3)
        scores = query.reshape(heads, group * n, spec.head_dim) @ k[:, :stop].swapaxes(1, 2)
        attended = _attended(chosen_blocks(index_q[a:b], keys, span.start + a, indexer), span.start + a, stop, indexer)
        np.copyto(scores.reshape(heads, group, n, stop), -np.inf, where=~attended)
        blocks = _weighted(scores, v[:, :stop], spec).reshape(heads, group, n, spec.value_dim).transpose(2, 0, 1, 3)
        out[a:b] = blocks.reshape(n, spec.heads, spec.value_dim)


def _attended(chosen: NDArray[np.bool_], start: int, stop: int, indexer: Indexer) -> NDArray[np.bool_]:
    """Which positions ``0 .. stop - 1`` rows at positions ``start ..`` attend: ``(rows, stop)``."""
    positions, rows = np.arange(stop), np.arange(start, start + len(chosen))[:, None]
    open_from = (rows + 1) // indexer.block * indexer.block  # first position that is in no complete block
    attended: NDArray[np.bool_] = (positions >= open_from) & (positions <= rows)
    inside = np.repeat(chosen, indexer.block, axis=1)[:, :stop]
    attended[:, : inside.shape[1]] |= inside
    return attended


def _weighted(scores: Floats, values: Floats, spec: AttentionSpec) -> Floats:
    """``softmax(scores) @ values``, per K/V head."""
    if spec.softcap is not None:
        attention.cap(scores, spec.softcap)
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=2, keepdims=True)
    out: Floats = scores @ values
    out /= sums
    return out


def _write_index(store: NumpyPageStore, layer: int, span: Span, table: np.ndarray, rows: Floats) -> None:
    part = len(store.layout.layers[layer]) - 1
    chunks, pages, at = _places(store, table, np.arange(span.start, span.start + span.rows))
    for chunk in np.unique(chunks):
        here = chunks == chunk
        with np.errstate(over="ignore"):  # beyond 65504 becomes inf, as on any device
            store.part(int(chunk), layer, part)[pages[here], 0, at[here]] = rows[here]


def _heads(
    store: NumpyPageStore, layer: int, part: int, table: np.ndarray, positions: NDArray[np.intp]
) -> Floats:
    """Keys or values of some positions as float32, ``(kv_heads, positions, width)``."""
    stored = _rows(store, layer, part, table, positions)
    scale_part = attention.scales_of(store, layer, part)
    scales = None if scale_part is None else _rows(store, layer, scale_part, table, positions)
    out = np.empty(stored.shape, np.float32)
    decode(store.layout.kv_type, stored, scales, out)
    return np.ascontiguousarray(out.swapaxes(0, 1))


def _rows(
    store: NumpyPageStore, layer: int, part: int, table: np.ndarray, positions: NDArray[np.intp]
) -> NDArray[Any]:
    """What the pages hold of some positions, ``(positions, heads, width)`` as stored."""
    shape = store.layout.layers[layer][part]
    out = np.empty((len(positions), shape.heads, shape.width), shape.dtype)
    chunks, pages, at = _places(store, table, positions)
    for chunk in np.unique(chunks):
        here = chunks == chunk
        out[here] = store.part(int(chunk), layer, part)[pages[here], :, at[here]]
    return out


def _places(
    store: NumpyPageStore, table: np.ndarray, positions: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Chunk, page within it and row within that of each position."""
    pages, at = np.divmod(positions, store.layout.page_tokens)
    chunks, local = np.divmod(np.asarray(table, np.intp)[pages], store.chunk_pages)
    return chunks, local, at


def _rotated(keys: Floats, positions: NDArray[np.intp], rotation: Rotation) -> Floats:
    """Keys ``(n, dim)`` turned by their positions, each angle the float32 product that :meth:`Backend.rope` takes."""
    angles = positions[:, None].astype(np.float32) * rotation.inverse_frequencies
    cos, sin = (np.float32(rotation.magnitude) * f(angles).astype(np.float32) for f in (np.cos, np.sin))
    half, rotated = rotation.rotated // 2, rotation.rotated
    if rotation.interleaved:
        first, second = keys[:, 0:rotated:2].copy(), keys[:, 1:rotated:2].copy()
        keys[:, 0:rotated:2], keys[:, 1:rotated:2] = first * cos - second * sin, second * cos + first * sin
    else:
        first, second = keys[:, :half].copy(), keys[:, half:rotated].copy()
        keys[:, :half], keys[:, half:rotated] = first * cos - second * sin, second * cos + first * sin
    return keys
