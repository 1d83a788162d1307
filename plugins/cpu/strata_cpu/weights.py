"""Weight matrices in the layout of the kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_core.weights.tensor import StoredTensor

from . import library as native
from .slabs import Slabs

logger = logging.getLogger(__name__)

_LANES = 16


class Matrix:
    """One or several weight matrices of equal ``in_features``, stacked, repacked into panels of 16 rows.

    Types that the kernels know keep their codes; others are dequantised and kept as float16.

    :ivar struct: what native functions take.
    :ivar edges: ``(parts + 1,)`` first row of every part, and the number of rows.
    :ivar nbytes: memory held.
    :raises OutOfMemory: there is none left.
    """

    def __init__(self, library: ctypes.CDLL, engine: int, slabs: Slabs, tensors: Sequence[StoredTensor]):
        self.width = tensors[0].shape[1]
        self.edges: list[int] = np.concatenate([[0], np.cumsum([t.shape[0] for t in tensors])]).tolist()
        sources = [_source(tensor) for tensor in tensors]
        strides: list[int] = [library.strata_panel_bytes(stored, self.width) for stored, _ in sources]
        panels = [-(-tensor.shape[0] // _LANES) for tensor in tensors]
        self.nbytes = sum(count * stride for count, stride in zip(panels, strides, strict=True))
        memory = slabs.take(self.nbytes, self, tensors[0].name)
        self.parts = (native.Part * len(tensors))()
        for i, (part, tensor, (stored, data)) in enumerate(zip(self.parts, tensors, sources, strict=True)):
            part.kind, part.rows, part.width = library.strata_kind(stored), tensor.shape[0], self.width
            part.panels, part.stride, part.data = panels[i], strides[i], memory
            library.strata_pack(engine, stored, data.ctypes.data, part)
            memory += panels[i] * strides[i]
        self.struct = self._stacked(self.parts)

    def with_biases(self, biases: Sequence[NDArray[np.float32] | None]) -> native.Matrix:
        """The same matrix, with a bias for each part or None. Keep the biases as long as the result."""
        parts = (native.Part * len(self.parts))(*self.parts)
        for part, bias in zip(parts, biases, strict=True):
            part.bias = None if bias is None else bias.ctypes.data
        return self._stacked(parts)

    def _stacked(self, parts: ctypes.Array[native.Part]) -> native.Matrix:
        return native.Matrix(len(parts), self.edges[-1], self.width, sum(part.panels for part in parts), parts)


def _source(tensor: StoredTensor) -> tuple[int, NDArray[np.uint8]]:
    """The type that the native packer reads, and the bytes."""
    if tensor.type in native.STORED:
        return native.STORED.index(tensor.type), tensor.data
    values = tensor.dequantise()
    kept = "F16" if np.abs(values).max(initial=0) < 65504 else "F32"
    logger.info("tensor %s: type %s has no kernels; kept as %s", tensor.name, tensor.type, kept)
    numbers = values.astype(np.float16) if kept == "F16" else values
    return native.STORED.index(kept), numbers.view(np.uint8).reshape(-1)
