"""Reader of safetensors files.

Layout (little endian)::

    u64 header bytes · header: JSON object · data
    header: {"__metadata__": {str: str}, NAME: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, ...}

Offsets count from the end of the header. The file may come from anywhere: sizes are checked against the bytes that are
there before anything is made of them, and data may neither overlap nor leave gaps, as the format demands.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.weights.mapped import map_file, unmap
from strata_core.weights.quant import TYPES
from strata_core.weights.quant.base import Bytes
from strata_core.weights.tensor import Place, StoredTensor

#: Names of types: there and here. Bytes (quantised formats pack their codes into them) are taken as ``I8``.
_DTYPES = {
    "F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16",
    "I64": "I64", "I32": "I32", "I16": "I16", "I8": "I8", "U8": "I8",
}  # fmt: skip
#: Largest header: what the format's own library accepts.
_LONGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 8


class SafetensorsFile:
    """An opened file: its tensors by name, as views of a memory map.

    :ivar path: the file. :ivar tensors: in file order.
    """

    def __init__(self, path: Path):
        """
        :raises NotFound: there is no such file.
        :raises ModelFileError: it is not a well-formed safetensors file; ``param`` names the tensor.
        :raises UnsupportedModel: a tensor is of a type that is not known here.
        """
        self.path = path
        self._mapping = map_file(path)
        try:
            self.tensors: Mapping[str, StoredTensor] = _read(path, self._mapping)
        except BaseException:
            unmap(self._mapping)
            raise

    def close(self) -> None:
        """Forget the tensors and unmap the file; while a tensor is still held, the map stays until it goes."""
        self.tensors = {}
        unmap(self._mapping)


def _read(path: Path, mapping: mmap.mmap) -> dict[str, StoredTensor]:
    header, start = _header(path, mapping)
    size = len(mapping) - start
    found: list[tuple[int, int, StoredTensor]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, begin, end = _entry(path, name, entry)
        if not 0 <= begin <= end <= size:
            problem = f"tensor {name} has offsets {begin} to {end}, but the file holds {size} bytes of data"
            raise ModelFileError(f"{path}: {problem}; it was cut short or is damaged", param=name)
        nbytes = TYPES[kind].size * math.prod(shape)
        if end - begin != nbytes:
            raise ModelFileError(
                f"{path}: tensor {name} has {end - begin} bytes, but its type and shape need {nbytes}", param=name
            )
        found.append((begin, end, _tensor(name, shape, kind, mapping, Place(path, start + begin), nbytes)))
    found.sort(key=lambda item: item[:2])
    at = 0
    for begin, end, tensor in found:
        if begin != at:
            problem = "overlap those before them" if begin < at else f"leave a gap of {begin - at} bytes before them"
            raise ModelFileError(f"{path}: the data of tensor {tensor.name} {problem}", param=tensor.name)
        at = end
    if at != size:
        raise ModelFileError(f"{path}: {size - at} bytes of data belong to no tensor; the file is damaged")
    return {tensor.name: tensor for _, _, tensor in found}


def _header(path: Path, mapping: mmap.mmap) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(mapping[:8], "little")
    if len(mapping) < 8 or length > min(_LONGEST_HEADER, len(mapping) - 8):
        raise ModelFileError(f"{path}: not a safetensors file, or it was cut short (its header is {length} bytes long)")
    try:
        header = json.loads(mapping[8 : 8 + length].decode(), object_pairs_hook=_without_repeats)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the header is no JSON object")
    return header, 8 + length


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape and data offsets of a tensor, each of the right kind."""
    try:
        if not isinstance(entry, dict):
            raise TypeError(entry)
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise TypeError(entry)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{path}: the header's entry of tensor {name} is malformed", param=name) from error
    if len(shape) > _MOST_DIMENSIONS:
        raise ModelFileError(f"{path}: tensor {name} has {len(shape)} dimensions", param=name)
    if dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        problem = f"tensor {name} is of type {dtype}, which is not supported (known: {known})"
        raise UnsupportedModel(f"{path}: {problem}", param=name)
    return _DTYPES[dtype], tuple(shape) or (1,), begin, end


def _tensor(
    name: str, shape: tuple[int, ...], kind: str, mapping: mmap.mmap, place: Place, nbytes: int
) -> StoredTensor:
    data = np.frombuffer(mapping, np.uint8, nbytes, place.offset) if nbytes else np.empty(0, np.uint8)
    if place.offset % TYPES[kind].size == 0 or not nbytes:
        return StoredTensor(name, shape, kind, data, place)
    # Old writers did not pad the header, and some processors cannot read numbers at odd addresses.
    row = nbytes // shape[0]

    def read(start: int, stop: int) -> Bytes:
        return np.array(data[start * row : stop * row])

    return StoredTensor(name, shape, kind, read, place)
