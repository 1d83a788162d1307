"""Tensors made of other tensors without copying them: renamed, reordered, cut, joined, computed.

Files of different makers hold the same weights in different order. A derived tensor describes the order that is wanted
and takes rows out of the file when they are asked for, so that memory beside the file is needed for the rows in hand
only. Numbers are moved as bit patterns; their type stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.weights.quant.base import Bytes, Floats
from strata_core.weights.tensor import StoredTensor

Bits = NDArray[Any]

#: Unsigned integers of the size of a type's elements.
_BITS = {
    "F64": "<u8", "I64": "<u8", "F32": "<u4", "I32": "<u4", "F16": "<u2", "BF16": "<u2", "I16": "<u2", "I8": "u1",
}  # fmt: skip


def bits(tensor: StoredTensor) -> Bits:
    """The elements of a tensor of an unquantised type as unsigned integers, in its shape: a view of the file."""
    return tensor.data.view(_BITS[tensor.type]).reshape(tensor.shape)


def renamed(tensor: StoredTensor, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
    """The same bytes under another name and, where given, in another shape of as many elements."""
    if tensor.derived and shape is not None:
        raise ValueError(f"{tensor.name} is derived; its rows cannot be counted in another way")
    content = tensor.rows if tensor.derived else tensor.data
    return StoredTensor(name, tensor.shape if shape is None else shape, tensor.type, content, tensor.place)


def rearranged(name: str, array: Bits, type: str, lead: int = 1, shape: tuple[int, ...] | None = None) -> StoredTensor:
    """A strided view of a tensor's bits as a tensor.

    :param array: any view that numpy can express, such as a transposition or every other row.
    :param lead: its first ``lead`` axes run through the rows of the result.
    :param shape: the result's shape; None takes the axes after those of the rows as they are.
    """
    count = math.prod(array.shape[:lead])
    shape = (count, *array.shape[lead:]) if shape is None else shape
    if array.flags.c_contiguous and array.flags.aligned:
        return StoredTensor(name, shape, type, array.reshape(-1).view(np.uint8))

    def read(start: int, stop: int) -> Bytes:
        places = np.unravel_index(np.arange(start, stop), array.shape[:lead])
        return np.ascontiguousarray(array[places]).reshape(-1).view(np.uint8)

    return StoredTensor(name, shape, type, read)


def joined(name: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Tensors of one type and width below each other, as one with the rows of all."""
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part.shape[0])

    def read(start: int, stop: int) -> Bytes:
        pieces = [
            part.rows(max(start - first, 0), min(stop - first, part.shape[0]))
            for part, first in zip(parts, edges, strict=False)
            if first < stop and start < first + part.shape[0]
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])

    return StoredTensor(name, (edges[-1], *parts[0].shape[1:]), parts[0].type, read)


def abreast(name: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Matrices of one unquantised type and height side by side, as one of all their columns."""
    arrays = [bits(part) for part in parts]

    def read(start: int, stop: int) -> Bytes:
        return np.concatenate([array[start:stop] for array in arrays], axis=1).reshape(-1).view(np.uint8)

    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts))
    return StoredTensor(name, shape, parts[0].type, read)


def stacked(name: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Tensors of one type and shape as one with a further outermost dimension, such as the experts of a layer."""

    def read(start: int, stop: int) -> Bytes:
        if stop == start + 1:
            return parts[start].data
        return np.concatenate([np.empty(0, np.uint8), *(part.data for part in parts[start:stop])])

    return StoredTensor(name, (len(parts), *parts[0].shape), parts[0].type, read)


def computed(name: str, tensor: StoredTensor, formula: Callable[[Floats], Floats]) -> StoredTensor:
    """A float32 tensor of the same shape; ``formula`` maps elements one by one, a few rows at a time."""

    def read(start: int, stop: int) -> Bytes:
        values = np.ascontiguousarray(formula(tensor.dequantise(slice(start, stop))), np.float32)
        return values.reshape(-1).view(np.uint8)

    return StoredTensor(name, tensor.shape, "F32", read)
