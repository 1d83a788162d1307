"""Embedding and output projection, which may be one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import Array, Backend
from strata_core.errors import ModelFileError

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


@attrs.frozen(eq=False)
class Vocabulary:
    """:ivar size: number of tokens."""

    embedding: Array
    output: Array
    size: int


def load_vocabulary(source: WeightSource, backend: Backend, width: int) -> Vocabulary:
    """:raises ModelFileError: a tensor is missing or has another shape."""
    embedding = source.require("token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != width:
        raise ModelFileError(
            f"{source.path}: tensor token_embd.weight has shape {embedding.shape}, not (vocabulary, {width})",
            param="token_embd.weight",
        )
    size = embedding.shape[0]
    if source.get("output.weight") is None:
        both = backend.matrix(embedding)
        return Vocabulary(both, both, size)
    return Vocabulary(backend.table(embedding), backend.matrix(source.require("output.weight", (size, width))), size)
