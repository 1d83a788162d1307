"""What model families and tokenizers read a model from, whatever the file format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeGuard, TypeVar, cast, overload

import blake3
import numpy as np

from strata_core.errors import ModelFileError
from strata_core.weights.tensor import StoredTensor

K = TypeVar("K")
Opened = TypeVar("Opened", bound="Lookups")
Entered = TypeVar("Entered", bound="WeightSource")

#: Tensors up to this size are hashed whole; of larger ones the first and last window and these many between.
_WHOLE = 65_536
_WINDOW = 4_096
_WINDOWS_BETWEEN = 8


class WeightSource(Protocol):
    """An opened model: its metadata and its tensors, both by name.

    Values of ``metadata`` are str, int, float and bool; lists of str; numpy arrays for arrays of numbers and booleans.
    """

    @property
    def path(self) -> Path:
        """The file that was opened, for messages."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Everything the file says about the model, by key."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, in file order."""

    def get(self, name: str) -> StoredTensor | None:
        """The tensor of that name, or None."""

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The tensor of that name.

        :param shape: the shape it must have, outermost dimension first; None accepts any.
        :raises ModelFileError: it is missing, or has another shape (the message has both).
        """

    @overload
    def key(self, key: str, default: K) -> K: ...

    @overload
    def key(self, key: str, default: None, kind: type[K]) -> K | None: ...

    def require_key(self, key: str, kind: type[K]) -> K:
        """The metadata value of that key.

        :param kind: str, int, float or bool; ``list`` for strings, ``numpy.ndarray`` for numbers. An int is accepted
            where a float is asked for; a bool is never a number.
        :raises ModelFileError: it is missing or of another kind.
        """

    def fingerprint(self) -> bytes:
        """16 bytes that tell these weights from others; see :func:`fingerprint`."""

    def close(self) -> None:
        """Let go of the file. Tensors that are still held keep it mapped."""

    def __enter__(self: Entered) -> Entered: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lookups:
    """The lookups of :class:`WeightSource`, for sources that provide ``path``, ``metadata`` and ``tensors``."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]

    def get(self, name: str) -> StoredTensor | None:
        return self.tensors.get(name)

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            expected = f" of shape {_times(shape)}" if shape is not None else ""
            raise ModelFileError(
                f"{self.path}: tensor {name}{expected} is missing; if this model came in several files, one of them is "
                "missing or was cut short",
                param=name,
            )
        if shape is not None and tensor.shape != shape:
            raise ModelFileError(
                f"{self.path}: tensor {name} has shape {_times(tensor.shape)}, but the model's metadata demand "
                f"{_times(shape)}",
                param=name,
            )
        return tensor

    @overload
    def key(self, key: str, default: K) -> K: ...

    @overload
    def key(self, key: str, default: None, kind: type[K]) -> K | None: ...

    def key(self, key: str, default: object, kind: type | None = None) -> object:
        """The metadata value of that key, or ``default`` when the file does not have it.

        :param kind: as in :meth:`require_key`; the kind of ``default`` when that is not None.
        :raises ModelFileError: the file has it with another kind.
        """
        if key not in self.metadata:
            return default
        return self.require_key(key, kind or type(default))

    def require_key(self, key: str, kind: type[K]) -> K:
        if key not in self.metadata:
            raise ModelFileError(f"{self.path}: metadata key {key} is missing", param=key)
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return cast(K, float(value))
        if not _is(value, kind):
            raise ModelFileError(
                f"{self.path}: metadata key {key} should be {_kind(kind)}, but is {_kind(type(value))}", param=key
            )
        return value

    def fingerprint(self) -> bytes:
        return fingerprint(self.tensors)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fingerprint(tensors: Mapping[str, StoredTensor]) -> bytes:
    """16 bytes (BLAKE3) that tell these weights from others by what they are, not by where they lie.

    Hashed are names, shapes and types in order of name, and the data: all of a small tensor, of a large one (more than
    64 KiB) its first and last 4 KiB and eight evenly spaced windows between. Other weights, another quantisation or a
    fine-tune change nearly every window. File name, metadata and the order of tensors in the file do not count.

    A change confined to bytes between the windows is not seen: this tells models apart, it does not detect damage.
    """
    digest = blake3.blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        # Fields end with a byte that none of them contains (UTF-8 has no 0xff), so no two lists of fields look alike.
        fields = (name, tensor.type, _times(tensor.shape))
        digest.update(b"".join(field.encode() + b"\xff" for field in fields))
        size = tensor.nbytes
        if size <= _WHOLE:
            digest.update(tensor.data.data)
            continue
        for start in np.linspace(0, size - _WINDOW, _WINDOWS_BETWEEN + 2).astype(np.int64):
            digest.update(tensor.data[start : start + _WINDOW].data)
    return digest.digest(length=16)


def _is(value: object, kind: type[K]) -> TypeGuard[K]:
    if isinstance(value, bool):
        return kind is bool  # to Python a bool is an int, to a model file it is not
    if kind is list and isinstance(value, list):
        return not value or isinstance(value[0], str)  # not an array of arrays
    return isinstance(value, kind)


def _times(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


def _kind(kind: type) -> str:
    names = {str: "a string", int: "an integer", float: "a float", bool: "a boolean", list: "a list of strings"}
    return names.get(kind, "an array of numbers")
