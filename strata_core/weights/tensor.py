"""A tensor as it lies in a model file, or as it follows from such tensors when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import attrs

from strata_core.weights.quant import TYPES, dequantise
from strata_core.weights.quant.base import Bytes, Floats

#: Gives the bytes of rows ``start`` to ``stop`` of a tensor, in one piece; a row is a step of the outermost dimension.
RowReader = Callable[[int, int], Bytes]


@attrs.frozen
class Place:
    """Where a tensor's bytes are, all in one piece: a file, and the offset of the first of them."""

    path: Path
    offset: int


@attrs.frozen
class StoredTensor:
    """A tensor that stays in its file, quantised as stored, until someone asks for numbers.

    :param name: its name in the file.
    :param shape: row-major, outermost dimension first: a linear weight is ``(out_features, in_features)``.
    :param type: a key of :data:`strata_core.weights.quant.TYPES`, such as ``Q4_1``.
    :param content: ``(nbytes,)`` uint8, a read-only view of the mapped file, which keeps the mapping alive; or what
        makes the bytes of some rows anew each time they are asked for (:mod:`strata_core.weights.derived`).
    :param place: where the bytes can be read past the mapping; None where they do not lie in one piece, or nobody says.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    _content: Bytes | RowReader = attrs.field(repr=False, eq=False, hash=False)
    place: Place | None = attrs.field(default=None, repr=False, eq=False, hash=False)

    @property
    def data(self) -> Bytes:
        """All bytes, ``(nbytes,)`` uint8: a view of the file, or for a derived tensor a new array of that size."""
        return self.rows(0, self.shape[0]) if callable(self._content) else self._content

    @property
    def derived(self) -> bool:
        """Whether its bytes are made when they are asked for: keep them rather than ask twice."""
        return callable(self._content)

    def rows(self, start: int, stop: int) -> Bytes:
        """The bytes of these rows of the outermost dimension, ``0 <= start <= stop <= shape[0]``: flat uint8.

        No more of the file is read than they need; of a stack of experts, a row is one expert's matrix.
        """
        if callable(self._content):
            return self._content(start, stop)
        row = self._content.nbytes // self.shape[0] if self.shape[0] else 0
        return self._content[start * row : stop * row]

    def inner(self, index: int) -> StoredTensor:
        """One of the tensors that this one stacks along its outermost dimension, such as the matrix of an expert."""
        name, shape = f"{self.name}[{index}]", self.shape[1:]
        if not callable(self._content):
            return StoredTensor(name, shape, self.type, self.rows(index, index + 1))

        def read(start: int, stop: int) -> Bytes:
            data = self.rows(index, index + 1)
            row = data.nbytes // shape[0] if shape[0] else 0
            return data[start * row : stop * row]

        return StoredTensor(name, shape, self.type, read)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return TYPES[self.type].nbytes(self.size)

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
        row = math.prod(self.shape[1:])
        if row % kind.block:
            raise ValueError(f"{self.name} is one-dimensional {self.type}: its elements cannot be read one by one")
        count = max(stop - start, 0)
        data = self.rows(start, start + count)
        return dequantise(kind, data, out).reshape(count, *self.shape[1:])
