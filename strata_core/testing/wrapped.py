"""Backends around other backends, to see what happens at the compute contract and to make it go wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata_core.compute.base import (
    Array,
    AttentionSpec,
    Backend,
    Batch,
    DeltaSpec,
    ExpertSpec,
    Indexer,
    PageStore,
    Rotation,
    Router,
)
from strata_core.errors import BackendError
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena
    from strata_core.weights.tensor import StoredTensor


class WrappedBackend(Backend):
    """Passes every operation on to another backend. Subclasses change what happens on the way.

    All operations on arrays go through :meth:`_call`, so that a subclass can look at, or exchange, every array that
    enters or leaves the inner backend.
    """

    def __init__(self, inner: Backend):
        self.inner = inner
        self.name = inner.name
        self.host_memory = inner.host_memory
        self.kv_types = inner.kv_types

    def _call(self, operation: Callable[..., Any], *args: Any, consumed: Array = None) -> Any:
        """Run an operation of the inner backend.

        :param consumed: the argument whose memory the operation may reuse, or None.
        """
        return operation(*args)

    def _read(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Run an operation of the inner backend whose results are the host's."""
        return operation(*args)

    def matrix(self, *tensors: StoredTensor) -> Array:
        return self._call(self.inner.matrix, *tensors)

    def table(self, tensor: StoredTensor) -> Array:
        return self._call(self.inner.table, tensor)

    def vector(self, tensor: StoredTensor) -> Array:
        return self._call(self.inner.vector, tensor)

    def from_host(self, values: np.ndarray) -> Array:
        return self._call(self.inner.from_host, values)

    def to_host(self, x: Array) -> np.ndarray:
        out: np.ndarray = self._read(self.inner.to_host, x)
        return out

    def page_store(self, layout: PageLayout, chunk_pages: int, arena: Arena) -> PageStore:
        return self.inner.page_store(layout, chunk_pages, arena)

    def weight_bytes(self) -> int:
        return self.inner.weight_bytes()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()

    def top(self, scores: np.ndarray, k: int) -> np.ndarray:
        return self.inner.top(scores, k)

    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Any:
        return self.inner.begin(batch, stores)

    def embed(self, step: Any, table: Array, scale: float = 1.0) -> Array:
        return self._call(self.inner.embed, step, table, scale)

    def select_outputs(self, step: Any, x: Array) -> Array:
        return self._call(self.inner.select_outputs, step, x)

    def rope(self, step: Any, x: Array, rotation: Rotation, heads: int) -> Array:
        return self._call(self.inner.rope, step, x, rotation, heads, consumed=x)

    def attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array | None,
        spec: AttentionSpec,
        sinks: Array | None = None,
    ) -> Array:
        return self._call(self.inner.attention, step, layer, q, k, v, spec, sinks)

    def indexed_attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array,
        spec: AttentionSpec,
        index_q: Array,
        index_k: Array,
        indexer: Indexer,
    ) -> Array:
        return self._call(self.inner.indexed_attention, step, layer, q, k, v, spec, index_q, index_k, indexer)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self._call(self.inner.rms_norm, x, weight, eps)

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        return self._call(self.inner.linear, x, weight, bias)

    def linear_split(
        self, x: Array, weight: Array, biases: Sequence[Array | None] | None = None
    ) -> tuple[Array, ...]:
        parts: tuple[Array, ...] = self._call(self.inner.linear_split, x, weight, biases)
        return parts

    def group_norm(self, x: Array, weight: Array, groups: int, eps: float) -> Array:
        return self._call(self.inner.group_norm, x, weight, groups, eps)

    def group_dot(self, x: Array, y: Array, groups: int) -> Array:
        return self._call(self.inner.group_dot, x, y, groups)

    def l2_norm(self, x: Array, width: int, eps: float) -> Array:
        return self._call(self.inner.l2_norm, x, width, eps)

    def head_linear(self, x: Array, weight: Array) -> Array:
        return self._call(self.inner.head_linear, x, weight)

    def causal_conv(
        self, step: Any, layer: tuple[int, int], x: Array, weight: Array, dilation: int = 1
    ) -> Array:
        return self._call(self.inner.causal_conv, step, layer, x, weight, dilation)

    def gated_delta(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array,
        spec: DeltaSpec,
    ) -> Array:
        return self._call(self.inner.gated_delta, step, layer, q, k, v, decay, beta, spec)

    def experts(
        self,
        gate: StoredTensor,
        up: StoredTensor | None,
        down: StoredTensor,
        gate_up_bias: StoredTensor | None = None,
        down_bias: StoredTensor | None = None,
    ) -> Array:
        return self._call(self.inner.experts, gate, up, down, gate_up_bias, down_bias)

    def route(self, x: Array, router: Router) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = self._read(self.inner.route, x, router)
        return ids, weights

    def mixture(
        self, x: Array, ids: np.ndarray, weights: np.ndarray, experts: Array, spec: ExpertSpec
    ) -> Array:
        return self._call(self.inner.mixture, x, ids, weights, experts, spec)

    def activate(self, x: Array, activation: str) -> Array:
        return self._call(self.inner.activate, x, activation, consumed=x)

    def multiply(self, x: Array, y: Array) -> Array:
        return self._call(self.inner.multiply, x, y, consumed=x)

    def shift(self, x: Array, vector: Array) -> Array:
        return self._call(self.inner.shift, x, vector, consumed=x)

    def scale(self, x: Array, factor: float) -> Array:
        return self._call(self.inner.scale, x, factor, consumed=x)

    def split(self, x: Array, widths: Sequence[int], heads: int = 1) -> tuple[Array, ...]:
        parts: tuple[Array, ...] = self._call(self.inner.split, x, widths, heads, consumed=x)
        return parts

    def join(self, parts: Sequence[Array], heads: int = 1) -> Array:
        return self._call(self.inner.join, list(parts), heads)

    def repeat(self, x: Array, times: int) -> Array:
        return self._call(self.inner.repeat, x, times)

    def fold(self, x: Array, groups: int) -> Array:
        return self._call(self.inner.fold, x, groups)

    def add(self, x: Array, y: Array) -> Array:
        return self._call(self.inner.add, x, y, consumed=x)

    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        return self._call(self.inner.gated, gate, up, activation, consumed=gate)

    def add_linear(self, x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
        return self._call(self.inner.add_linear, x, y, weight, bias, consumed=x)

    def gated_mlp(self, x: Array, gate_up: Array, down: Array, activation: str) -> Array:
        return self._call(self.inner.gated_mlp, x, gate_up, down, activation)


class FaultyBackend(WrappedBackend):
    """Raises BackendError in chosen steps.

    A step fails after its first attention layer: the K/V of one layer are in the pages by then and those of the others
    are not, as after a real fault.

    :param fail_steps: numbers of the steps that fail, counted from 0 over the life of the backend.
    :ivar steps: how many steps were begun.
    """

    def __init__(self, inner: Backend, fail_steps: Collection[int]):
        super().__init__(inner)
        self.fail_steps = frozenset(fail_steps)
        self.steps = 0

    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Any:
        self.steps += 1
        return super().begin(batch, stores)

    def attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array | None,
        spec: AttentionSpec,
        sinks: Array | None = None,
    ) -> Array:
        out = super().attention(step, layer, q, k, v, spec, sinks)
        self._fail_if_told()
        return out

    def indexed_attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array,
        spec: AttentionSpec,
        index_q: Array,
        index_k: Array,
        indexer: Indexer,
    ) -> Array:
        out = super().indexed_attention(step, layer, q, k, v, spec, index_q, index_k, indexer)
        self._fail_if_told()
        return out

    def _fail_if_told(self) -> None:
        if self.steps - 1 in self.fail_steps:
            raise BackendError(f"step {self.steps - 1} failed, as it was told to")
