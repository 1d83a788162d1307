"""Weights of the reference backend: float32 while there is room, as stored in the file otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.reference.kv import Floats
from strata_core.weights.quant import TYPES, dequantise
from strata_core.weights.tensor import StoredTensor

#: Up to this many rows ``(w @ x.T).T`` is used for ``x @ w.T``: BLAS packs the smaller operand, and reads the weights
#: once. Measured with OpenBLAS 0.3.31: 4 rows 76 against 124 ms for all matrices of a 135M model, even at about 50.
_FEW_ROWS = 48
#: Elements dequantised at a time when a matrix is not kept as float32 (4 MiB).
_BLOCK = 1 << 20


class Matrix:
    """One or several weight matrices of equal ``in_features``, stacked.

    :ivar width: ``in_features``.
    :ivar edges: ``(parts + 1,)`` first row of every part, and the number of rows.
    :ivar dense: float32 ``(edges[-1], width)``, or None: the parts are then dequantised in each use.
    """

    def __init__(self, parts: Sequence[StoredTensor]):
        self.parts = tuple(parts)
        self.width = parts[0].shape[1]
        self.edges = np.concatenate([[0], np.cumsum([p.shape[0] for p in parts])]).tolist()
        self.dense: Floats | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the dense form, whether it is there or not."""
        return 4 * int(self.edges[-1]) * self.width

    def make_dense(self) -> None:
        dense = np.empty((self.edges[-1], self.width), np.float32)
        for part, start, stop in zip(self.parts, self.edges, self.edges[1:], strict=False):
            part.dequantise(out=dense[start:stop])
        self.dense = dense

    def project(self, x: Floats) -> Floats:
        """``x @ self.T``: ``(rows, width)`` to ``(rows, edges[-1])``."""
        if self.dense is not None:
            return _product(x, self.dense)
        out = np.empty((len(x), self.edges[-1]), np.float32)
        step = max(1, _BLOCK // self.width)
        for part, start in zip(self.parts, self.edges, strict=False):
            for a in range(0, part.shape[0], step):
                block = part.dequantise(slice(a, a + step))
                out[:, start + a : start + a + len(block)] = _product(x, block)
        return out

    def rows(self, tokens: NDArray[np.int32]) -> Floats:
        """The rows of these numbers, ``(len(tokens), width)``, in a new array."""
        if self.dense is not None:
            return self.dense[tokens]
        part = self.parts[0]
        kind = TYPES[part.type]
        if part.derived:  # all of its data at once would be a copy of the matrix
            stored = np.concatenate([part.rows(token, token + 1) for token in tokens.tolist()])
        else:
            stored = part.data.reshape(part.shape[0], kind.nbytes(self.width))[tokens]
        return dequantise(kind, stored.reshape(-1)).reshape(len(tokens), self.width)


def _product(x: Floats, weight: Floats) -> Floats:
    if 1 < len(x) <= _FEW_ROWS:
        return np.ascontiguousarray((weight @ x.T).T)
    product: Floats = x @ weight.T
    return product
