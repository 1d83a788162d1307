"""Types of equal steps with one float16 scale per block of 32 elements, and a minimum in the ``_1`` types.

Layouts (bytes; ``d`` scale, ``m`` minimum, both float16): Q4_0 ``d[2] q[16]``, Q4_1 ``d[2] m[2] q[16]``,
Q5_0 ``d[2] h[4] q[16]``, Q5_1 ``d[2] m[2] h[4] q[16]``, Q8_0 ``d[2] q[32]``. Low halves of ``q`` are elements 0-15,
high halves 16-31; bit i of the 32-bit word ``h`` is the fifth bit of element i.

Larger blocks of few bits: Q2_0 ``d[2] q[16]``, 64 elements of two bits, lowest first, that stand for -1, 0, 1 and 2;
Q1_0 ``d[2] q[16]``, 128 elements of one bit, for -1 and 1. Both as llama.cpp dequantises them, to the bit.
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


def _q2_0(blocks: Bytes, out: Floats) -> None:
    codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 64)
    codes &= np.uint8(3)
    write_scaled(out, codes.view(np.int8) - np.int8(1), halves(blocks, 0))


def _q1_0(blocks: Bytes, out: Floats) -> None:
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=1, bitorder="little").view(np.int8)
    write_scaled(out, bits * np.int8(2) - np.int8(1), halves(blocks, 0))


TYPES = (
    TensorType("Q1_0", 41, 128, 18, _q1_0),
    TensorType("Q2_0", 42, 64, 18, _q2_0),
    TensorType("Q4_0", 2, 32, 18, _q4_0),
    TensorType("Q4_1", 3, 32, 20, _q4_1),
    TensorType("Q5_0", 6, 32, 22, _q5_0),
    TensorType("Q5_1", 7, 32, 24, _q5_1),
    TensorType("Q8_0", 8, 32, 34, _q8_0),
)
