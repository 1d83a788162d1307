"""The parts of a GGUF header: a cursor over the map, metadata values, tensor entries."""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from strata_core.errors import ModelFileError
from strata_core.weights.quant import BY_CODE
from strata_core.weights.quant.base import Bytes
from strata_core.weights.tensor import Place, StoredTensor

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
#: Numbers by GGUF value type.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

#: Least bytes of a key (empty name, one-byte value), a tensor (empty name, one dimension), a nested array (empty).
_LEAST_KEY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_LEAST_ARRAY = 4 + 8
#: Longest key or name: what the format allows a key; it also bounds what an error message repeats.
_LONGEST_NAME = 65_535
_MOST_DIMENSIONS = 4
#: Arrays of arrays are in the format but in no model; a bound keeps a hostile file from exhausting the stack.
_DEEPEST = 4


class Cursor:
    """A reading position in the mapped header. Reading beyond the end is a :class:`ModelFileError`.

    ``what`` in the methods is the thing being read, for the message; ``param`` the key or tensor it belongs to.
    """

    def __init__(self, mapping: mmap.mmap, path: str):
        self.mapping = mapping
        self.path = path
        self.at = 0
        self.size = len(mapping)

    def error(self, problem: str, param: str | None = None) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}", param=param)

    def skip(self, count: int, what: str, param: str | None = None) -> int:
        """Move over ``count`` bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            problem = f"the file ends in {what}: {count} bytes needed at {start}, {self.size - start} there"
            raise self.error(f"{problem}; it was cut short or is damaged", param)
        self.at = start + count
        return start

    def u32(self, what: str, param: str | None = None) -> int:
        return int(_U32.unpack_from(self.mapping, self.skip(4, what, param))[0])

    def u64(self, what: str, param: str | None = None) -> int:
        return int(_U64.unpack_from(self.mapping, self.skip(8, what, param))[0])

    def check_count(self, count: int, least: int, what: str, param: str | None = None) -> None:
        """Refuse a count of things of at least ``least`` bytes that cannot fit in what remains."""
        if count * least > self.size - self.at:
            raise self.error(f"{what} {count} cannot fit in the {self.size - self.at} bytes that remain", param)

    def string(self, what: str, param: str | None = None) -> str:
        length = self.u64(what, param)
        start = self.skip(length, what, param)
        return self._decode(self.mapping[start : start + length], what, param)

    def name(self, what: str) -> str:
        """A key or tensor name."""
        length = self.u64(what)
        if length > _LONGEST_NAME:
            raise self.error(f"{what} is {length} bytes long, more than {_LONGEST_NAME}", what)
        start = self.skip(length, what, what)
        return self._decode(self.mapping[start : start + length], what, what)

    def strings(self, count: int, param: str) -> list[str]:
        """``count`` strings. Vocabularies have 10^5 of them: one tight loop instead of a call per field."""
        self.check_count(count, 8, f"the length of {param},", param)
        mapping, at, size, unpack = self.mapping, self.at, self.size, _U64.unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(mapping, at)[0]
                if at > size:
                    raise self.error(f"string {len(result)} of {param} reaches beyond the end of the file", param)
                append(mapping[start:at].decode())
        except struct.error as error:
            raise self.error(f"the file ends in the strings of {param}", param) from error
        except UnicodeDecodeError as error:
            raise self.error(f"string {len(result)} of {param} is not UTF-8: {error}", param) from error
        self.at = at
        return result

    def _decode(self, raw: bytes, what: str, param: str | None) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}", param) from error


def read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    """The ``count`` keys and values at the cursor."""
    cursor.check_count(count, _LEAST_KEY, "a key count of")
    metadata: dict[str, object] = {}
    for index in range(count):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise cursor.error(f"metadata key {key} occurs twice", key)
        metadata[key] = _value(cursor, cursor.u32(f"the type of {key}", key), key)
    return metadata


def _value(cursor: Cursor, code: int, key: str) -> object:
    if code == _STRING:
        return cursor.string(f"the value of {key}", key)
    if code == _ARRAY:
        return _array(cursor, key, depth=1)
    if code == _BOOL:
        return bool(_booleans(cursor, 1, key)[0])
    if code in _NUMBERS:
        return _numbers(cursor, code, 1, key)[0].item()
    raise cursor.error(f"metadata key {key} has unknown value type {code}", key)


def _array(cursor: Cursor, key: str, depth: int) -> object:
    code = cursor.u32(f"the element type of {key}", key)
    count = cursor.u64(f"the length of {key}", key)
    if code == _STRING:
        return cursor.strings(count, key)
    if code == _BOOL:
        return _booleans(cursor, count, key)
    if code in _NUMBERS:
        return _numbers(cursor, code, count, key)
    if code != _ARRAY:
        raise cursor.error(f"metadata key {key} has unknown element type {code}", key)
    if depth == _DEEPEST:
        raise cursor.error(f"metadata key {key} nests arrays deeper than {_DEEPEST}", key)
    cursor.check_count(count, _LEAST_ARRAY, f"the length of {key},", key)
    return [_array(cursor, key, depth + 1) for _ in range(count)]


def _numbers(cursor: Cursor, code: int, count: int, key: str) -> np.ndarray[Any, Any]:
    dtype = _NUMBERS[code]
    start = cursor.skip(count * dtype.itemsize, f"the value of {key}", key)
    # A copy, so that metadata outlive the map.
    return np.frombuffer(cursor.mapping, dtype, count, start).copy() if count else np.empty(0, dtype)


def _booleans(cursor: Cursor, count: int, key: str) -> np.ndarray[Any, Any]:
    raw = _numbers(cursor, 0, count, key)
    if raw.size and raw.max() > 1:
        raise cursor.error(f"metadata key {key} holds a boolean that is neither 0 nor 1", key)
    return raw.view(np.bool_)


def read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    """The ``count`` tensors listed at the cursor, their data checked to lie in the file and apart from each other."""
    cursor.check_count(count, _LEAST_TENSOR, "a tensor count of")
    entries = [_entry(cursor, index) for index in range(count)]
    data_start = -(-cursor.at // alignment) * alignment
    mapped = np.frombuffer(cursor.mapping, np.uint8)
    tensors: dict[str, StoredTensor] = {}
    for name, shape, code, offset in entries:
        if name in tensors:
            raise cursor.error(f"tensor {name} occurs twice", name)
        tensors[name] = _tensor(cursor, (name, shape, code), mapped, data_start, offset, alignment)
    taken = sorted((offset, name) for name, _, _, offset in entries)
    for (offset, name), (following, other) in pairwise(taken):
        if offset + tensors[name].nbytes > following:
            raise cursor.error(f"the data of tensors {name} and {other} overlap", other)
    return tensors


def _entry(cursor: Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.name(f"the name of tensor {index}")
    dimensions = cursor.u32(f"the dimensions of tensor {name}", name)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.error(f"tensor {name} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible", name)
    sizes = [cursor.u64(f"the shape of tensor {name}", name) for _ in range(dimensions)]
    code = cursor.u32(f"the type of tensor {name}", name)
    offset = cursor.u64(f"the offset of tensor {name}", name)
    return name, tuple(reversed(sizes)), code, offset


def _tensor(
    cursor: Cursor, head: tuple[str, tuple[int, ...], int], mapped: Bytes, data_start: int, offset: int, alignment: int
) -> StoredTensor:
    name, shape, code = head
    kind = BY_CODE.get(code)
    if kind is None:
        raise cursor.error(f"tensor {name} has unknown type {code}", name)
    if 0 in shape:
        raise cursor.error(f"tensor {name} has a dimension of size 0: {shape}", name)
    if shape[-1] % kind.block:
        problem = f"tensor {name}: rows of {shape[-1]} elements do not divide into {kind.name} blocks of {kind.block}"
        raise cursor.error(problem, name)
    if offset % alignment:
        raise cursor.error(f"the data of tensor {name} start at {offset}, not a multiple of {alignment}", name)
    start = data_start + offset
    end = start + kind.nbytes(math.prod(shape))
    if end > cursor.size:
        problem = f"tensor {name} ({kind.name}, shape {shape}) ends at byte {end}, but the file has {cursor.size}"
        raise cursor.error(f"{problem}; it was cut short or is damaged", name)
    return StoredTensor(name, shape, kind.name, mapped[start:end], Place(Path(cursor.path), start))
