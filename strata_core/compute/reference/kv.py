"""Conversion between float32 and what a page stores; the types are those of :data:`strata_core.pool.layout.KV_TYPES`.

* ``f16``: IEEE binary16, rounded to nearest even.
* ``bf16``: the upper 16 bits of a float32, rounded to nearest even.
* ``int8``: one float32 scale per head and position, ``max |x| / 127``; elements are ``round(x / scale)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Every binary16 number as float32. Looking a number up is four times as fast as numpy's conversion.
_HALVES: Floats = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def encode(kv_type: str, rows: Floats) -> tuple[NDArray[Any], Floats | None]:
    """What a page stores for ``rows`` ``(n, heads, width)``: the elements, and scales ``(n, heads, 1)`` or None."""
    if kv_type == "f16":
        with np.errstate(over="ignore"):  # beyond 65504 becomes inf, as on any device
            return rows.astype(np.float16), None
    if kv_type == "bf16":
        return _round_bf16(rows), None
    if kv_type == "int8":
        scales = np.abs(rows).max(axis=-1, keepdims=True)
        scales /= np.float32(127)
        codes = np.divide(rows, scales, out=np.zeros(rows.shape, np.float32), where=scales > 0)
        return np.rint(codes, out=codes).astype(np.int8), scales
    return rows, None


def decode(kv_type: str, stored: NDArray[Any], scales: Floats | None, out: Floats) -> None:
    """The reverse of :func:`encode`, into ``out``; all arrays have, or broadcast to, the shape of ``out``.

    Rows that were never written may hold any bytes, so this never warns about what they decode to.
    """
    if kv_type == "f16":
        # mode="clip" because the default copies through a buffer; no 16-bit index is out of range.
        np.take(_HALVES, stored.view(np.uint16), out=out, mode="clip")
    elif kv_type == "bf16":
        bits = out.view(np.uint32)
        np.copyto(bits, stored)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, stored)
        if scales is not None:
            with np.errstate(all="ignore"):
                np.multiply(out, scales, out=out)


def _round_bf16(rows: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(rows).view(np.uint32)
    odd = (bits >> 16) & np.uint32(1)
    rounded: NDArray[np.uint16] = ((bits + odd + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    rounded[np.isnan(rows)] = 0x7FC0  # the carry would turn some NaNs into inf
    return rounded
