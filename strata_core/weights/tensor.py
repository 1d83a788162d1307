"""A tensor as it lies in a model file."""

from __future__ import annotations

import math

import attrs

from strata_core.weights.quant import TYPES, dequantise
from strata_core.weights.quant.base import Bytes, Floats


@attrs.frozen
class StoredTensor:
    """A tensor that stays in its file, quantised as stored, until someone asks for numbers.

    :param name: its name in the file.
    :param shape: row-major, outermost dimension first: a linear weight is ``(out_features, in_features)``.
    :param type: a key of :data:`strata_core.weights.quant.TYPES`, such as ``Q4_1``.
    :param data: ``(nbytes,)`` uint8, a read-only view of the mapped file. It keeps the mapping alive.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: Bytes = attrs.field(repr=False, eq=False, hash=False)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dequantise(self, rows: slice | None = None, out: Floats | None = None) -> Floats:
        """The numbers, as float32.

        :param rows: a range of the outermost dimension with step 1, as in ``array[rows]``; None for all. Only the
            bytes of these rows are read. Not for one-dimensional tensors of block types, whose elements cannot be
            reached one by one.
        :param out: a C-contiguous float32 array to write them to and return a view of; None for a new one.
        :raises UnsupportedModel: the type has no dequantiser.
        :raises ValueError: ``rows`` has a step, or cuts through blocks; or ``out`` is of another size or kind.
        """
        kind = TYPES[self.type]
        if rows is None:
            return dequantise(kind, self.data, out).reshape(self.shape)
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows of {self.name} can only be read in order, not with step {step}")
        row = self.size // self.shape[0]
        if row % kind.block:
            raise ValueError(f"{self.name} is one-dimensional {self.type}: its elements cannot be read one by one")
        count = max(stop - start, 0)
        data = self.data[start * kind.nbytes(row) : (start + count) * kind.nbytes(row)]
        return dequantise(kind, data, out).reshape(count, *self.shape[1:])
