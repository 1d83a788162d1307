"""What a tensor type is, and the arithmetic that most quantised types share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: Turns ``(n, bytes)`` uint8 blocks into the ``(n, elements)`` float32 array given as second argument.
Decoder = Callable[[Bytes, Floats], None]


@attrs.frozen
class TensorType:
    """How the elements of a tensor are stored.

    A tensor is a run of blocks: ``block`` elements in ``size`` bytes. The innermost dimension of a tensor is a whole
    number of blocks, so that every row can be read by itself.

    :param name: the name the field uses, such as ``Q4_1``.
    :param code: its number in GGUF files.
    :param decode: the dequantiser, or None for a type whose size is known but whose contents Strata does not read.
    """

    name: str
    code: int
    block: int
    size: int
    decode: Decoder | None = None

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` elements, which must be a whole number of blocks."""
        return elements // self.block * self.size


def halves(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """The ``count`` little-endian float16 numbers at byte ``start`` of each block, as ``(n, count)`` float32."""
    # Taken out of the strided blocks first: a view of two bytes as one number needs them side by side.
    part = np.ascontiguousarray(blocks[:, start : start + 2 * count])
    return part.view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """``(n, k)`` bytes to ``(n, 2, k)``: first the low halves of all bytes, then the high halves."""
    words = np.ascontiguousarray(packed).view(np.uint64)  # eight bytes at a time; k is a multiple of 8 in every type
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    codes = np.empty((words.shape[0], 2, words.shape[1]), np.uint64)
    np.bitwise_and(words, mask, out=codes[:, 0])
    np.right_shift(words, np.uint64(4), out=codes[:, 1])
    codes[:, 1] &= mask
    return codes.view(np.uint8)


def write_scaled(out: Floats, codes: NDArray[Any], scale: Floats, offset: Floats | None = None) -> None:
    """``out = codes * scale + offset`` in float32, without a temporary of the size of ``out``.

    :param out: ``(n, elements)``, overwritten.
    :param codes: ``(n, elements)`` small integers, any shape with that many elements per block.
    :param scale: ``(n, groups)``; each covers ``elements / groups`` consecutive elements.
    :param offset: like ``scale``, or None.
    """
    n, groups = scale.shape
    grouped = out.reshape(n, groups, -1)
    np.copyto(grouped, codes.reshape(grouped.shape))
    # Scales of a damaged or hostile file may be inf or nan; what they give is then what the file says.
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(grouped, scale[:, :, None], out=grouped)
        if offset is not None:
            np.add(grouped, offset[:, :, None], out=grouped)
