"""Recurrent layers in numpy: state pages, causal convolution, gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from strata_core.compute.base import NO_STATE, Backend, DeltaSpec
from strata_core.compute.reference.kv import Floats
from strata_core.errors import BackendError

if TYPE_CHECKING:
    from strata_core.compute.base import Batch
    from strata_core.compute.reference.pages import NumpyPageStore


class HostRecurrent(Backend):
    """Steps of backends whose arrays are numpy's have ``batch`` and ``stores``."""

    def causal_conv(
        self, step: Any, layer: tuple[int, int], x: Floats, weight: Floats, dilation: int = 1
    ) -> Floats:
        channels, kernel = weight.shape
        out = np.empty_like(x)
        for rows, before, after in _states(step.batch, step.stores, layer):
            own, past = x[rows], (kernel - 1) * dilation
            history = np.zeros((past + len(own), channels), np.float32)
            if before is not None:
                history[:past] = before.reshape(past, channels)
            history[past:] = own
            out[rows] = sum(history[j * dilation : j * dilation + len(own)] * weight[:, j] for j in range(kernel))
            after[:] = history[len(own) :].reshape(after.shape)
        return out

    def gated_delta(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Floats,
        k: Floats,
        v: Floats,
        decay: Floats,
        beta: Floats,
        spec: DeltaSpec,
    ) -> Floats:
        rows, repeat = len(q), spec.value_heads // spec.key_heads
        queries = np.repeat(q.reshape(rows, spec.key_heads, spec.key_dim), repeat, axis=1)
        keys = np.repeat(k.reshape(rows, spec.key_heads, spec.key_dim), repeat, axis=1)
        values = v.reshape(rows, spec.value_heads, spec.value_dim)
        factors = np.exp(decay)
        out = np.empty((rows, spec.value_heads, spec.value_dim), np.float32)
        for own, before, after in _states(step.batch, step.stores, layer):
            shape = (spec.value_heads, spec.key_dim, spec.value_dim)
            state = np.zeros(shape, np.float32) if before is None else before.reshape(shape).copy()
            for row in range(own.start, own.stop):
                state *= factors[row][:, None, None]
                known = np.matmul(keys[row][:, None, :], state)
                change = (values[row][:, None, :] - known) * beta[row][:, None, None]
                state += keys[row][:, :, None] * change
                out[row] = np.matmul(queries[row][:, None, :], state)[:, 0]
            after[:] = state.reshape(after.shape)
        return out.reshape(rows, -1)


def _states(
    batch: Batch, stores: tuple[NumpyPageStore, ...], layer: tuple[int, int]
) -> Iterator[tuple[slice, Floats | None, Floats]]:
    """Of every span: its rows, one state before them (None: zeros), and where the state after them goes."""
    store, number = stores[layer[0]], layer[1]

    def view(page: int) -> Floats:
        chunk, local = divmod(page, store.chunk_pages)
        state: Floats = store.part(chunk, number, 0)[local]
        return state

    start = 0
    for span in batch.spans:
        if span.state is None:
            raise BackendError("a span of a model with recurrent state names no pages for it")
        before, after = span.state
        yield slice(start, start + span.rows), None if before == NO_STATE else view(before), view(after)
        start += span.rows
