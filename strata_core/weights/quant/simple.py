"""Types of 32 elements per block with one float16 scale, and a minimum in the ``_1`` types.

Layouts (bytes; ``d`` scale, ``m`` minimum, both float16): Q4_0 ``d[2] q[16]``, Q4_1 ``d[2] m[2] q[16]``,
Q5_0 ``d[2] h[4] q[16]``, Q5_1 ``d[2] m[2] h[4] q[16]``, Q8_0 ``d[2] q[32]``. Low halves of ``q`` are elements 0-15,
high halves 16-31; bit i of the 32-bit word ``h`` is the fifth bit of element i.
"""

from __future__ import annotations

import numpy as np

from strata_core.weights.quant.base import Bytes, Floats, TensorType, halves, nibbles, write_scaled


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    codes = nibbles(low).reshape(-1, 32)
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    codes |= bits << np.uint8(4)
    return codes


def _q4_0(blocks: Bytes, out: Floats) -> None:
    codes = nibbles(blocks[:, 2:]).view(np.int8)
    codes -= np.int8(8)
    write_scaled(out, codes, halves(blocks, 0))


def _q4_1(blocks: Bytes, out: Floats) -> None:
    head = halves(blocks, 0, 2)
    write_scaled(out, nibbles(blocks[:, 4:]), head[:, :1], head[:, 1:])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8)
    codes -= np.int8(16)
    write_scaled(out, codes, halves(blocks, 0))


def _q5_1(blocks: Bytes, out: Floats) -> None:
    head = halves(blocks, 0, 2)
    write_scaled(out, _five_bits(blocks[:, 4:8], blocks[:, 8:]), head[:, :1], head[:, 1:])


def _q8_0(blocks: Bytes, out: Floats) -> None:
    write_scaled(out, blocks[:, 2:].view(np.int8), halves(blocks, 0))


TYPES = (
    TensorType("Q4_0", 2, 32, 18, _q4_0),
    TensorType("Q4_1", 3, 32, 20, _q4_1),
    TensorType("Q5_0", 6, 32, 22, _q5_0),
    TensorType("Q5_1", 7, 32, 24, _q5_1),
    TensorType("Q8_0", 8, 32, 34, _q8_0),
)
