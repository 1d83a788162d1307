"""The table of tensor types, and dequantisation of any of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from strata_core.errors import UnsupportedModel
from strata_core.weights.quant import codebook, kquants, plain, simple
from strata_core.weights.quant.base import Bytes, Floats, TensorType

#: Known by size only, so that a file that holds them can be opened, inspected and refused by name.
_NOT_DECODED = (
    TensorType("Q8_1", 9, 32, 40),
    TensorType("Q8_K", 15, 256, 292),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("F64", 28, 1, 8),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("NVFP4", 40, 64, 36),
)

_ALL = (*plain.TYPES, *simple.TYPES, *kquants.TYPES, *codebook.TYPES, *_NOT_DECODED)

#: Types by name.
TYPES: Mapping[str, TensorType] = MappingProxyType({kind.name: kind for kind in _ALL})
#: Types by their number in GGUF files.
BY_CODE: Mapping[int, TensorType] = MappingProxyType({kind.code: kind for kind in _ALL})

#: Elements decoded at a time: codes and result of one piece stay in the second-level cache, and the memory that is
#: needed beside the result is bounded whatever the size of the tensor.
_PIECE = 131_072


def dequantise(kind: TensorType, data: Bytes, out: Floats | None = None) -> Floats:
    """Decode a run of blocks.

    :param data: ``(bytes,)`` uint8, a whole number of blocks, not necessarily aligned.
    :param out: where to write: C-contiguous float32 with as many elements, of any shape; None for a new array.
    :return: ``(elements,)`` float32, a view of ``out`` if that was given. The arithmetic is float32 in the order that
        the format's reference uses, so results are reproducible to the bit.
    :raises UnsupportedModel: no dequantiser for this type.
    :raises ValueError: ``out`` is not as described.
    """
    if kind.decode is None:
        raise UnsupportedModel(f"tensors of type {kind.name} cannot be dequantised")
    blocks = data.reshape(-1, kind.size)
    if out is None:
        out = np.empty((blocks.shape[0], kind.block), np.float32)
    elif not (out.flags.c_contiguous and out.dtype == np.float32):
        raise ValueError("numbers can only be written to a contiguous float32 array")
    out = out.reshape(blocks.shape[0], kind.block)
    step = _PIECE // kind.block
    for start in range(0, blocks.shape[0], step):
        kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)
