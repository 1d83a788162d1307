"""Types whose four-bit codes index a fixed table of values.

MXFP4 (OCP microscaling formats 1.0): ``e[1] q[16]``, 32 elements in FP4 E2M1 with a shared power-of-two scale. IQ4_NL:
``d[2] q[16]``, a table denser around zero. Halves of ``q`` as in Q4_0.
"""

from __future__ import annotations

import numpy as np

from strata_core.weights.quant.base import Bytes, Floats, TensorType, halves, nibbles, write_scaled

#: E2M1 values, doubled to be integers.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
#: E8M0 scales (2 ** (e - 127)), halved because the table above is doubled.
_E8M0_HALF = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    write_scaled(out, _E2M1[nibbles(blocks[:, 1:])], _E8M0_HALF[blocks[:, :1]])


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    write_scaled(out, _NON_LINEAR[nibbles(blocks[:, 2:])], halves(blocks, 0))


TYPES = (
    TensorType("MXFP4", 39, 32, 17, _mxfp4),
    TensorType("IQ4_NL", 20, 32, 18, _iq4_nl),
)
