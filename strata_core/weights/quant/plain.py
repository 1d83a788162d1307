"""Types that are not quantised: one number per element."""

from __future__ import annotations

import numpy as np

from strata_core.weights.quant.base import Bytes, Floats, TensorType


def _f32(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, blocks.view("<f4"))


def _f16(blocks: Bytes, out: Floats) -> None:
    with np.errstate(invalid="ignore"):  # a signalling nan
        np.copyto(out, blocks.view("<f2"))


def _bf16(blocks: Bytes, out: Floats) -> None:
    # bfloat16 is the upper half of a float32.
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


TYPES = (
    TensorType("F32", 0, 1, 4, _f32),
    TensorType("F16", 1, 1, 2, _f16),
    TensorType("BF16", 30, 1, 2, _bf16),
)
