"""What recurrent layers are given to native functions as: shapes, arrays, and where sequences keep their states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import NO_STATE, DeltaSpec
from strata_core.errors import BackendError

from . import library as native
from .step import Step

Floats = NDArray[np.float32]


class States:
    """The states of one layer in a step. Keeps what :attr:`struct` refers to.

    :raises BackendError: a span names no pages for its state.
    """

    def __init__(self, step: Step, layer: tuple[int, int]):
        store, number = step.stores[layer[0]], layer[1]
        before, after = [], []
        for span in step.batch.spans:
            if span.state is None:
                raise BackendError("a span of a model with recurrent state names no pages for it")
            pages = (
                None if page == NO_STATE else store.part(page // store.chunk_pages, number, 0)[page % store.chunk_pages]
                for page in span.state
            )
            read, written = (0 if page is None else page.ctypes.data for page in pages)
            before.append(read)
            after.append(written)
        self._row = np.ascontiguousarray(step.batch.offsets, np.int32)
        self._before, self._after = np.array(before, np.uint64), np.array(after, np.uint64)
        self.struct = native.States(
            len(before), self._row.ctypes.data, self._before.ctypes.data, self._after.ctypes.data
        )


def delta_struct(
    spec: DeltaSpec, q: Floats, k: Floats, v: Floats, factor: Floats, beta: Floats, out: Floats
) -> native.Delta:
    """All arrays C-contiguous; the caller keeps them."""
    addresses = (array.ctypes.data for array in (q, k, v, factor, beta, out))
    return native.Delta(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, *addresses)


def conv_struct(x: Floats, weight: Floats, dilation: int, out: Floats) -> native.Conv:
    """All arrays C-contiguous, ``weight`` ``(kernel, channels)``; the caller keeps them."""
    kernel, channels = weight.shape
    return native.Conv(channels, kernel, dilation, x.ctypes.data, weight.ctypes.data, out.ctypes.data)
