"""The K types: super-blocks of 256 elements whose groups have small integer scales of their own.

Layouts (bytes; ``d`` and ``dmin`` float16, scales as packed integers):

===== ============================================ ==========================================
type  layout                                       groups
===== ============================================ ==========================================
Q2_K  scales[16] q[64] d[2] dmin[2]                16 of 16; scale low half, minimum high half
Q3_K  h[32] q[64] scales[12] d[2]                  16 of 16; six-bit scales, 32 is zero
Q4_K  d[2] dmin[2] scales[12] q[128]               8 of 32; six-bit scales and minimums
Q5_K  d[2] dmin[2] scales[12] h[32] q[128]         8 of 32; as Q4_K
Q6_K  q[128] h[64] scales[16] d[2]                 16 of 16; eight-bit signed scales
===== ============================================ ==========================================
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_core.weights.quant.base import Bytes, Floats, TensorType, halves, nibbles, write_scaled


def _crumbs(packed: Bytes) -> Bytes:
    """``(n, k, 32)`` bytes to ``(n, k, 4, 32)``: the two-bit fields of all 32 bytes, lowest field first."""
    fields = np.empty((*packed.shape[:2], 4, 32), np.uint8)
    for field in range(4):
        np.right_shift(packed, np.uint8(2 * field), out=fields[:, :, field])
    fields &= np.uint8(3)
    return fields


def _bit_planes(packed: Bytes) -> Bytes:
    """``(n, 32)`` bytes to ``(n, 8, 32)``: bit 0 of all 32 bytes, then bit 1, and so on."""
    planes = np.empty((packed.shape[0], 8, 32), np.uint8)
    for bit in range(8):
        np.right_shift(packed, np.uint8(bit), out=planes[:, bit])
    planes &= np.uint8(1)
    return planes


def _q2_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, :16]
    d, dmin = halves(blocks, 80), halves(blocks, 82)
    with np.errstate(invalid="ignore"):
        scale = d * (scales & np.uint8(15)).astype(np.float32)
        offset = -(dmin * (scales >> np.uint8(4)).astype(np.float32))
    write_scaled(out, _crumbs(blocks[:, 16:80].reshape(-1, 2, 32)), scale, offset)


def _q3_k_scales(packed: Bytes) -> NDArray[np.int8]:
    """``(n, 12)`` bytes to the 16 signed scales: eight bytes of low halves, four bytes of upper two bits."""
    low = np.concatenate([packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)], axis=1)
    upper = np.concatenate([packed[:, 8:] >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=1)
    scales: NDArray[np.int8] = (low | upper << np.uint8(4)).view(np.int8)
    scales -= np.int8(32)
    return scales


def _q3_k(blocks: Bytes, out: Floats) -> None:
    codes = _crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    codes |= _bit_planes(blocks[:, :32]) << np.uint8(2)
    signed = codes.view(np.int8)
    signed -= np.int8(4)  # the third bit says "not four less"
    with np.errstate(invalid="ignore"):
        scale = halves(blocks, 108) * _q3_k_scales(blocks[:, 96:108]).astype(np.float32)
    write_scaled(out, signed, scale)


def _scales_and_offsets(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and eight (negated) minimums of Q4_K and Q5_K blocks, each ``(n, 8)``.

    Bytes 0-3 hold the first four scales and 4-7 the first four minimums in their lower six bits; the last four of
    both have their low halves in bytes 8-11 and their upper two bits in the upper two bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, four, two = np.uint8(0x3F), np.uint8(4), np.uint8(0x30)
    scales = np.concatenate([first & six, third & np.uint8(15) | first >> np.uint8(2) & two], axis=1)
    minimums = np.concatenate([second & six, third >> four | second >> np.uint8(2) & two], axis=1)
    with np.errstate(invalid="ignore"):
        return halves(blocks, 0) * scales.astype(np.float32), -(halves(blocks, 2) * minimums.astype(np.float32))


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scale, offset = _scales_and_offsets(blocks)
    write_scaled(out, nibbles(np.ascontiguousarray(blocks[:, 16:]).reshape(-1, 32)), scale, offset)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scale, offset = _scales_and_offsets(blocks)
    codes = nibbles(np.ascontiguousarray(blocks[:, 48:]).reshape(-1, 32)).reshape(-1, 8, 32)
    codes |= _bit_planes(blocks[:, 16:48]) << np.uint8(4)
    write_scaled(out, codes, scale, offset)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # Each half of the block: 64 bytes whose low halves are elements 0-63 and high halves 64-127.
    codes = nibbles(np.ascontiguousarray(blocks[:, :128]).reshape(-1, 64)).reshape(-1, 2, 4, 32)
    codes |= _crumbs(blocks[:, 128:192].reshape(-1, 2, 32)) << np.uint8(4)
    signed = codes.view(np.int8)
    signed -= np.int8(32)
    with np.errstate(invalid="ignore"):
        scale = halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    write_scaled(out, signed, scale)


TYPES = (
    TensorType("Q2_K", 10, 256, 84, _q2_k),
    TensorType("Q3_K", 11, 256, 110, _q3_k),
    TensorType("Q4_K", 12, 256, 144, _q4_k),
    TensorType("Q5_K", 13, 256, 176, _q5_k),
    TensorType("Q6_K", 14, 256, 210, _q6_k),
)
