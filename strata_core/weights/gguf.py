"""Reader of GGUF files, versions 2 and 3, little endian.

Layout (all numbers little endian; a *string* is a u64 byte count and UTF-8)::

    magic "GGUF" · u32 version · u64 tensor count · u64 key count
    per key:    string key · u32 value type · value
    per tensor: string name · u32 dimensions · u64 size of each, innermost first · u32 tensor type · u64 offset
    padding to general.alignment (32 unless set), then the data that the offsets count from

The file may come from anywhere. Every count is checked against the bytes that remain before anything is made of it, so
that a damaged or hostile file costs an error message and no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from strata_core.errors import ModelFileError
from strata_core.weights.gguf_parse import Cursor, read_metadata, read_tensors
from strata_core.weights.mapped import map_file, unmap
from strata_core.weights.source import Lookups
from strata_core.weights.tensor import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32


class GGUFFile(Lookups):
    """An opened GGUF file: a :class:`~strata_core.weights.source.WeightSource` over a memory map.

    Opening parses the header and checks it whole; tensor data are not touched until they are used.

    :ivar path: the file.
    :ivar version: GGUF version, 2 or 3.
    :ivar size: bytes of the file.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        version: int,
        metadata: dict[str, object],
        tensors: dict[str, StoredTensor],
    ):
        self.path = path
        self.version = version
        self.size = len(mapping)
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self._mapping = mapping

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map the file and read its header.

        :raises NotFound: there is no such file.
        :raises ModelFileError: it cannot be read, or is not a well-formed GGUF file; ``param`` names the key or tensor.
        """
        path = Path(path)
        mapping = map_file(path)
        try:
            return cls._parse(path, mapping)
        except BaseException:
            unmap(mapping)
            raise

    @classmethod
    def _parse(cls, path: Path, mapping: mmap.mmap) -> GGUFFile:
        cursor = Cursor(mapping, str(path))
        if mapping[:4] != MAGIC:
            raise ModelFileError(f"{path}: not a GGUF file (it begins with {mapping[:4]!r})", param="magic")
        cursor.skip(4, "the magic")
        version = cursor.u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "big-endian files are not supported" if swapped else f"GGUF version {version} is not supported"
            raise ModelFileError(f"{path}: {why}; versions {' and '.join(map(str, VERSIONS))} are", param="version")
        tensor_count = cursor.u64("the tensor count")
        key_count = cursor.u64("the key count")
        metadata = read_metadata(cursor, key_count)
        tensors = read_tensors(cursor, tensor_count, _alignment(path, metadata))
        return cls(path, mapping, version, metadata, tensors)

    def close(self) -> None:
        """Forget the tensors and unmap the file; while a tensor's data are still held, the map stays until they go."""
        self.tensors = MappingProxyType({})
        unmap(self._mapping)


def _alignment(path: Path, metadata: dict[str, object]) -> int:
    key = "general.alignment"
    value = metadata.get(key, DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1):
        raise ModelFileError(f"{path}: {key} is {value!r}, which is not a power of two", param=key)
    return value
