"""JSON files of a Hugging Face folder, with every complaint naming file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from strata_core.errors import ModelFileError, NotFound

K = TypeVar("K")

_KINDS: Mapping[type, str] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip
#: Tokenizers of the largest vocabularies have 35 MB.
_LARGEST = 200 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    :raises NotFound: there is no such file. :raises ModelFileError: it cannot be read, or holds something else.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ModelFileError(f"{path}: larger than any such file ({path.stat().st_size >> 20} MiB)")
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise NotFound(f"no such file: {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: holds no JSON object")
    return values


class Config:
    """Typed access to the keys of a JSON object. ``null`` counts as absent.

    :param path: the file, for messages. :param within: key of the object within the file, for messages.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], within: str = ""):
        self.path = path
        self._values = values
        self._within = within

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def require(self, key: str, kind: type[K]) -> K:
        """The value of a key; an integer is accepted where a number is asked for.

        :raises ModelFileError: it is missing or of another kind; ``param`` is the key.
        """
        value = self._values.get(key)
        name = self._within + key
        if value is None:
            raise ModelFileError(f"{self.path}: key {name} is missing", param=name)
        if kind is float and type(value) is int:
            return cast(K, float(value))
        if type(value) is not kind:  # to Python a bool is an int, here it is not
            raise ModelFileError(f"{self.path}: key {name} is {value!r:.80}, not {_KINDS[kind]}", param=name)
        return value

    def any(self, key: str) -> Any:
        """The value of a key that may be of several kinds; None where it is absent."""
        return self._values.get(key)

    @overload
    def get(self, key: str, default: K) -> K: ...

    @overload
    def get(self, key: str, default: None, kind: type[K]) -> K | None: ...

    def get(self, key: str, default: Any, kind: Any = None) -> Any:
        """The value of a key, or ``default`` where it is absent.

        :raises ModelFileError: it is of another kind than ``kind`` (or ``default``).
        """
        return self.require(key, kind or type(default)) if key in self else default

    def size(self, key: str, default: int | None = None) -> int:
        """A count of something, from 1 to 2**31 - 1.

        :raises ModelFileError: it is missing and there is no default, or is no such number.
        """
        value = self.require(key, int) if default is None else self.get(key, default)
        if not 0 < value < 1 << 31:
            raise ModelFileError(f"{self.path}: key {self._within}{key} is {value}", param=self._within + key)
        return value

    def with_defaults(self, values: Mapping[str, Any]) -> Config:
        """The same with ``values`` for keys that are absent."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return Config(self.path, {**values, **given}, self._within)

    def part(self, key: str) -> Config:
        """The object under a key; an empty one where it is absent."""
        return Config(self.path, self.get(key, {}), f"{self._within}{key}.")

    def merged(self, key: str) -> Config:
        """This object with the keys of the object under ``key`` over its own: the text part of a larger model."""
        return Config(self.path, {**self._values, **self.require(key, dict)}, self._within)
