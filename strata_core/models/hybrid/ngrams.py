"""Embeddings of n-grams within a layer (Qwen4-Exp's per-layer embedding).

Every position looks up rows of a table by hashes of the last two, three, ... token ids. What it finds is projected to a
key for each stream of the residual and one value; the key's likeness to the stream gates the value, and a dilated
convolution of what comes of it is added. Nothing is kept of the ids: a span brings along those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import Array, Backend, Batch
from strata_core.weights.rows import RowTable

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

Ids = NDArray[np.int64]


@attrs.frozen(eq=False)
class NGramHash:
    """Which rows of the table belong to a position.

    With the ids ``t0, t1, ...`` of a position and those before it, a head of order ``n`` looks up row
    ``(t0 * m0 ^ t1 * m1 ^ ... ^ t(n-1) * m(n-1)) % size + offset``. Ids before the sequence's beginning, and those on
    the far side of an end-of-text token, count as end-of-text.

    :ivar multipliers: int64 ``(size,)``, one for each distance, where ``size`` is the highest order.
    :ivar sizes: int64 ``(size - 1, heads)``, row for row of order 2, 3, ...; :ivar offsets: the same.
    """

    multipliers: Ids
    sizes: Ids
    offsets: Ids
    end_of_text: int

    @property
    def lookback(self) -> int:
        return len(self.multipliers) - 1

    def rows(self, tokens: NDArray[np.int32], before: NDArray[np.int32]) -> Ids:
        """``(len(tokens), (size - 1) * heads)`` row numbers.

        :param before: the ids before the first token, at least ``lookback`` of them where there are so many.
        """
        back, count = self.lookback, len(tokens)
        start = np.full(back, self.end_of_text, np.int64)
        history = np.concatenate([start, before, tokens]).astype(np.int64)[-(count + back) :]
        mixed = history[back:] * self.multipliers[0]
        cut = np.zeros(count, bool)
        found = []
        for distance in range(1, back + 1):
            ids = np.where(cut, self.end_of_text, history[back - distance : back - distance + count])
            cut |= ids == self.end_of_text
            mixed = mixed ^ (ids * self.multipliers[distance])
            found.append(mixed[:, None] % self.sizes[distance - 1] + self.offsets[distance - 1])
        return np.concatenate(found, axis=1)


@attrs.frozen(eq=False)
class NGramEmbedding:
    """The part of one layer.

    :ivar projections: key and value, stacked.
    :ivar state: (state store, number) of the convolution's state; its dilation is the highest order of n-grams.
    """

    backend: Backend
    hash: NGramHash
    table: RowTable
    streams: int
    width: int
    eps: float
    projections: Array
    key_norm: Array
    query_norm: Array
    conv_norm: Array
    conv: Array
    state: tuple[int, int]

    @classmethod
    def load(
        cls,
        source: WeightSource,
        backend: Backend,
        prefix: str,
        hash: NGramHash,
        table: RowTable,
        *,
        streams: int,
        width: int,
        kernel: int,
        eps: float,
        state: tuple[int, int],
    ) -> NGramEmbedding:
        """:raises ModelFileError: a tensor is missing or has another shape."""
        whole, embedded = streams * width, hash.sizes.size * table.width

        def norm(name: str) -> Array:
            return backend.vector(source.require(f"{prefix}ple_norm_{name}.weight", (whole,)))

        return cls(
            backend=backend,
            hash=hash,
            table=table,
            streams=streams,
            width=width,
            eps=eps,
            projections=backend.matrix(
                source.require(prefix + "ple_key.weight", (whole, embedded)),
                source.require(prefix + "ple_value.weight", (width, embedded)),
            ),
            key_norm=norm("key"),
            query_norm=norm("query"),
            conv_norm=norm("conv"),
            conv=backend.vector(source.require(prefix + "ple_conv1d.weight", (whole, kernel))),
            state=state,
        )

    def forward(self, step: Any, batch: Batch, x: Array) -> Array:
        """What is added to the streams ``x`` ``(rows, streams * width)``: the same shape."""
        b, n = self.backend, self.streams
        key, value = b.linear_split(self._look_up(batch), self.projections)
        key = b.group_norm(key, self.key_norm, n, self.eps)
        query = b.group_norm(x, self.query_norm, n, self.eps)
        likeness = b.scale(b.group_dot(key, query, n), self.width**-0.5)
        gate = b.activate(b.activate(likeness, "signed_root"), "sigmoid")
        gated = b.multiply(b.repeat(value, n), gate)
        normed = b.group_norm(gated, self.conv_norm, n, self.eps)
        near = b.causal_conv(step, self.state, normed, self.conv, dilation=len(self.hash.multipliers))
        return b.add(gated, b.activate(near, "silu"))

    def _look_up(self, batch: Batch) -> Array:
        ids = [
            self.hash.rows(batch.tokens[first : first + span.rows], span.before)
            for first, span in zip(batch.offsets.tolist(), batch.spans, strict=False)
        ]
        rows = self.table.rows(np.concatenate(ids).reshape(-1))
        return self.backend.from_host(rows.reshape(batch.rows, -1))
