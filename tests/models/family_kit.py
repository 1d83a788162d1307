"""Loading the tiny folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tiny_folders import VOCAB

from strata_core.compute.base import Backend
from strata_core.models.base import Model, ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.weights import open_model
from strata_core.weights.source import Lookups
from strata_core.weights.tensor import StoredTensor

#: Longer than every window.
TOKENS = np.random.default_rng(1).integers(3, VOCAB, 90).astype(np.int32)

_FAMILIES = list(Plugins.load(environ={}, entry_points=[]).families().values())


class Changed(Lookups):
    """An opened model with other metadata (a None removes a key) and without some tensors."""

    def __init__(self, path: Path, metadata: Mapping[str, object] | None = None, without: tuple[str, ...] = ()):
        source = open_model(path)
        self.path = source.path
        merged = {**source.metadata, **(metadata or {})}
        self.metadata = {key: value for key, value in merged.items() if value is not None}
        self.tensors: dict[str, StoredTensor] = {n: t for n, t in source.tensors.items() if n not in without}

    def close(self) -> None:
        """The mapping goes with the tensors."""


def load(source: Path | Changed, backend: Backend) -> Model:
    opened = source if isinstance(source, Changed) else Changed(source)
    return load_model(opened, backend, _FAMILIES, ModelOptions())
