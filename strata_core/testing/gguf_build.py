"""Writes small GGUF files for tests, and quantises arrays for them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_core.weights.quant import TYPES

#: A float array (stored as its own dtype), or the bytes of a tensor with their type and row-major shape.
TensorData: TypeAlias = NDArray[Any] | tuple[str, bytes, tuple[int, ...]]

_BOOL, _STRING, _ARRAY = 7, 8, 9
_CODES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": _BOOL, "u8": 10, "i8": 11, "f8": 12}


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, TensorData],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a little-endian GGUF file.

    :param metadata: str, bool, int (stored as u32, or i32/u64/i64 where the value asks for it), float (f32), numpy
        scalars and arrays (as their own dtype) and sequences of one of these (an empty one holds strings).
        ``general.alignment`` is added when ``alignment`` is not 32.
    :param tensors: float32 or float16 arrays, row-major; or ``(type, bytes, shape)`` for any other type, see
        :func:`quantise`.
    :return: ``path``.
    """
    path = Path(path)
    keys = dict(metadata)
    if alignment != 32:
        keys["general.alignment"] = alignment
    header = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(keys))]
    header += [_string(key) + _value(value) for key, value in keys.items()]
    data = bytearray()
    for name, tensor in tensors.items():
        kind, raw, shape = tensor if isinstance(tensor, tuple) else _plain(tensor)
        data += bytes(-len(data) % alignment)
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        entry = struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", TYPES[kind].code, len(data))
        header.append(_string(name) + entry)
        data += raw
    head = b"".join(header)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def quantise(array: NDArray[Any], kind: str) -> tuple[str, bytes, tuple[int, ...]]:
    """Store ``array`` as F32, F16, BF16, Q8_0, Q4_0, Q4_1 or MXFP4.

    Rounds to nearest with a scale that covers each block; the last dimension must be a whole number of blocks.
    """
    numbers = np.ascontiguousarray(array, np.float32)
    blocks = numbers.reshape(-1, TYPES[kind].block)
    return kind, _QUANTISERS[kind](blocks), numbers.shape


def _bf16(blocks: NDArray[np.float32]) -> bytes:
    bits = blocks.view(np.uint32)
    to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    upper: NDArray[np.uint32] = (bits + to_even) >> np.uint32(16)
    return upper.astype("<u2").tobytes()


def _codes(blocks: NDArray[np.float32], scale: NDArray[np.float32], low: int, high: int) -> NDArray[np.float32]:
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint(blocks / safe), low, high)


def _halves(scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    return scale.astype("<f2").view(np.uint8)


def _packed(codes: NDArray[np.float32]) -> NDArray[np.uint8]:
    small: NDArray[np.uint8] = codes.astype(np.uint8)
    small[:, :16] |= small[:, 16:] << np.uint8(4)
    return small[:, :16]


def _q8_0(blocks: NDArray[np.float32]) -> bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = _codes(blocks, scale, -127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([_halves(scale), codes], axis=1).tobytes()


def _q4_0(blocks: NDArray[np.float32]) -> bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
    return np.concatenate([_halves(scale), _packed(_codes(blocks, scale, -8, 7) + 8)], axis=1).tobytes()


def _q4_1(blocks: NDArray[np.float32]) -> bytes:
    least = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - least) / np.float32(15)
    packed = _packed(_codes(blocks - least, scale, 0, 15))
    return np.concatenate([_halves(scale), _halves(least), packed], axis=1).tobytes()


def _mxfp4(blocks: NDArray[np.float32]) -> bytes:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    power = np.floor(np.log2(np.where(largest > 0, largest, 1))).astype(np.int32) - 2  # 4 is the largest power of two
    scaled = np.ldexp(np.abs(blocks), -power)
    codes = np.abs(scaled[:, :, None] - values).argmin(axis=2).astype(np.uint8)
    codes |= np.signbit(blocks).astype(np.uint8) << np.uint8(3)
    return np.concatenate([(power + 127).astype(np.uint8), _packed(codes.astype(np.float32))], axis=1).tobytes()


_QUANTISERS = {
    "F32": lambda blocks: blocks.astype("<f4").tobytes(),
    "F16": lambda blocks: blocks.astype("<f2").tobytes(),
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
}


def _plain(array: NDArray[Any]) -> tuple[str, bytes, tuple[int, ...]]:
    kind = {"f4": "F32", "f2": "F16"}[array.dtype.str[1:]]
    return kind, array.astype(array.dtype.newbyteorder("<")).tobytes(), array.shape


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.generic):
        return struct.pack("<I", _CODES[value.dtype.str[1:]]) + value.tobytes()
    if isinstance(value, (bool, int, float)):
        return _value(_typed([value])[0])
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", _ARRAY, _CODES[value.dtype.str[1:]], value.size)
        return head + value.tobytes()
    if isinstance(value, Sequence) and (not value or isinstance(value[0], str)):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(text) for text in value)
    if isinstance(value, Sequence):
        return _value(_typed(value))
    raise TypeError(f"GGUF metadata cannot hold {value!r}")


def _typed(values: Sequence[Any]) -> NDArray[Any]:
    """Numbers in the type that GGUF writers of the field choose: u32 and f32 where they fit."""
    array = np.array(values)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind == "f":
        return array.astype("<f4")
    for name in ("<u4", "<i4", "<i8", "<u8"):
        bounds = np.iinfo(name)
        if all(bounds.min <= value <= bounds.max for value in values):
            return np.array(values, name)
    raise TypeError(f"no GGUF integer type holds {values!r}")
