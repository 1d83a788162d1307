"""What the conformance tests of backends share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Array, Backend, Batch, PageStore, Span
from strata_core.memory.arena import Arena, PortableArena
from strata_core.testing.gguf_build import quantise
from strata_core.weights.tensor import StoredTensor


class BackendKit:
    """Makes the backend, and compares with it.

    :cvar tolerance: largest error of an operation, as a share of the largest expected number.
    :cvar kv_tolerance: the same for attention over K/V of each type. K/V that round to the other neighbour in a
        backend's own arithmetic are off by one step of the type; int8's steps are the ones that this matters for.
    :cvar model_tolerance: the same for the logits of a whole tiny model.
    """

    tolerance: ClassVar[float] = 1e-5
    kv_tolerance: ClassVar[Mapping[str, float]] = {"f32": 1e-5, "f16": 2e-5, "bf16": 2e-5, "int8": 2e-3}
    model_tolerance: ClassVar[float] = 1e-4

    def make_backend(self) -> Backend:
        """A new backend."""
        raise NotImplementedError("override make_backend")

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = self.make_backend()
        yield backend
        backend.close()

    @pytest.fixture
    def arena(self) -> Arena:
        return PortableArena("off")

    def close_to(self, actual: NDArray[Any], expected: NDArray[Any], tolerance: float | None = None) -> None:
        """Fail unless the arrays agree within the tolerance."""
        assert actual.shape == expected.shape
        assert actual.dtype == np.float32
        limit = (self.tolerance if tolerance is None else tolerance) * max(1.0, float(np.abs(expected).max(initial=0)))
        worst = float(np.abs(actual - expected).max(initial=0))
        assert worst <= limit, f"off by {worst:.3g}, allowed {limit:.3g}"


def random_rows(seed: int, *shape: int) -> NDArray[np.float32]:
    """Normally distributed float32 numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored(array: NDArray[np.float32], kind: str = "F32", name: str = "weight") -> StoredTensor:
    """A tensor as a model file would hold it."""
    found, data, shape = quantise(array, kind)
    return StoredTensor(name, shape, found, np.frombuffer(data, np.uint8))


def batch_of(spans: Sequence[Span], outputs: Sequence[int] = (), tokens: Sequence[int] | None = None) -> Batch:
    """A batch; tokens are 0 unless given."""
    rows = sum(span.rows for span in spans)
    ids = np.zeros(rows, np.int32) if tokens is None else np.array(tokens, np.int32)
    return Batch(ids, tuple(spans), np.array(outputs, np.int32))


def begin(backend: Backend, spans: Sequence[Span], stores: Sequence[PageStore] = (), **fields: Any) -> Array:
    """Start a step of :func:`batch_of`."""
    return backend.begin(batch_of(spans, **fields), stores)


def no_pages(start: int, rows: int) -> Span:
    """A span for operations that look at positions only."""
    return Span(start, rows, ())
