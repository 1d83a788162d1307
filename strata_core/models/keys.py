"""Reading a model's metadata so that nothing it says goes unheard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

#: Keys that say nothing about the arithmetic. The rotation's are checked where they are read.
_INFORMATIVE = {"vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon"}
#: Values other than zero that ask for nothing.
_NEUTRAL: Mapping[str, float | bool] = {
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.causal": True,
}


class Keys:
    """The keys below ``<architecture>.``; remembers which of them were read.

    A key that nobody read may ask for arithmetic that the family does not do: :meth:`refuse_others` says so, as a
    model that is computed only nearly right answers plausibly and wrong.
    """

    def __init__(self, source: WeightSource, architecture: str):
        self.source = source
        self.architecture = architecture
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.source.metadata

    def key(self, name: str) -> str:
        """The whole name of a key; it counts as read."""
        self._read.add(name)
        return f"{self.architecture}.{name}"

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        :raises ModelFileError: it is smaller, of another kind, or missing and there is no default.
        """
        return self._whole(name, default, 1)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0; errors as in :meth:`size`."""
        return self._whole(name, default, 0)

    def number(self, name: str, default: float | None = None) -> float:
        """
        :raises ModelFileError: it is not a number, or missing and there is no default.
        """
        key = self.key(name)
        return self.source.require_key(key, float) if default is None else self.source.key(key, default)

    def flag(self, name: str, default: bool) -> bool:
        return self.source.key(self.key(name), default)

    def wrong(self, name: str, why: str) -> ModelFileError:
        """The error that says what is wrong with a key's value."""
        key = self.key(name)
        return ModelFileError(f"{self.source.path}: {key} = {self.source.metadata.get(key)}: {why}", param=key)

    def unsupported(self, name: str) -> UnsupportedModel:
        """The error that says that a key's value asks for what the family does not do."""
        key = self.key(name)
        return UnsupportedModel(
            f"{self.source.path}: {key} = {self.source.metadata.get(key)} is not supported for this architecture",
            param=key,
        )

    def refuse_others(self, *ignored: str) -> None:
        """
        :param ignored: keys that say nothing new for this family.
        :raises UnsupportedModel: a key that was not read asks for something.
        """
        prefix = f"{self.architecture}."
        heard = {*self._read, *ignored, *_INFORMATIVE}
        for key, value in self.source.metadata.items():
            name = key[len(prefix) :]
            if not key.startswith(prefix) or name.startswith("rope.") or name in heard:
                continue
            asks = value.any() if isinstance(value, np.ndarray) else value  # zero and empty ask for nothing
            if asks and value != _NEUTRAL.get(name):
                raise self.unsupported(name)

    def _whole(self, name: str, default: int | None, least: int) -> int:
        key = self.key(name)
        value = self.source.require_key(key, int) if default is None else self.source.key(key, default)
        if value < least:
            raise ModelFileError(f"{self.source.path}: {key} is {value}; it must be at least {least}", param=key)
        return value
