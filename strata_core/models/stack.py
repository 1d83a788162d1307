"""Decoders put together from parts: attention of one kind, a feed-forward of another, norms before and after."""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from strata_core.compute.base import Array, AttentionSpec, Backend, Batch, ExpertSpec, Rotation, Router
from strata_core.experts import ExpertSource
from strata_core.models.layered import LayeredModel
from strata_core.models.loading import Ends


class Attention(Protocol):
    """The first half of a layer."""

    def attend(self, b: Backend, step: Any, x: Array) -> Array:
        """From normed rows to what their heads attended; writes the rows' K/V."""

    def project(self, b: Backend, attended: Array) -> Array:
        """Back to the model's width."""


class FeedForward(Protocol):
    """The second half of a layer."""

    def apply(self, b: Backend, x: Array) -> Array:
        """Normed rows ``(rows, width)`` to the same shape."""


@attrs.frozen(eq=False)
class GroupedAttention:
    """Rotary grouped-query attention, with norms of heads, biases and sinks where there are any.

    Fields are as in :class:`strata_core.compute.base.DecoderLayer`; ``sinks`` as in :meth:`Backend.attention`.
    """

    qkv: Array
    qkv_biases: tuple[Array | None, Array | None, Array | None]
    rotation: Rotation
    spec: AttentionSpec
    cache: tuple[int, int]
    output: Array
    output_bias: Array | None
    eps: float
    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None

    def attend(self, b: Backend, step: Any, x: Array) -> Array:
        q, k, v = b.linear_split(x, self.qkv, self.qkv_biases)
        if self.q_norm is not None:
            q = b.rms_norm(q, self.q_norm, self.eps)
        if self.k_norm is not None:
            k = b.rms_norm(k, self.k_norm, self.eps)
        q = b.rope(step, q, self.rotation, self.spec.heads)
        k = b.rope(step, k, self.rotation, self.spec.kv_heads)
        return b.attention(step, self.cache, q, k, v, self.spec, self.sinks)

    def project(self, b: Backend, attended: Array) -> Array:
        return b.linear(attended, self.output, self.output_bias)


@attrs.frozen(eq=False)
class GatedFeedForward:
    """A dense gated MLP; ``gate_up`` are the two matrices, stacked in this order."""

    gate_up: Array
    down: Array
    activation: str = "silu"

    def apply(self, b: Backend, x: Array) -> Array:
        return b.gated_mlp(x, self.gate_up, self.down, self.activation)


@attrs.frozen(eq=False)
class MixtureFeedForward:
    """Experts of a layer, chosen row by row, and those that every row shares.

    :ivar number: of the layer, as the source of experts counts.
    """

    number: int
    router: Router
    experts: ExpertSource
    spec: ExpertSpec
    shared: FeedForward | None = None

    def apply(self, b: Backend, x: Array) -> Array:
        ids, weights = b.route(x, self.router)
        experts = self.experts.fetch(self.number, ids)
        out = b.mixture(x, ids, weights, experts, self.spec)
        return out if self.shared is None else b.add(out, self.shared.apply(b, x))


@attrs.frozen(eq=False)
class Layer:
    """Attention, then a feed-forward, each of normed rows and added to them.

    :ivar attention_after: weight of a norm of what attention adds, or None; :ivar ffn_after: the same of the other.
    """

    attention_norm: Array
    attention: Attention
    ffn_norm: Array
    ffn: FeedForward
    eps: float
    attention_after: Array | None = None
    ffn_after: Array | None = None


class StackModel(LayeredModel):
    """A model made of :class:`Layer`. A subclass sets the attributes while it is loaded.

    :ivar _softcap: logits become ``softcap * tanh(logits / softcap)``; None for none.
    """

    _ends: Ends
    _layers: tuple[Layer, ...]
    _eps: float
    _embedding_scale: float = 1.0
    _softcap: float | None = None

    def embed(self, step: Any) -> Array:
        return self._backend.embed(step, self._ends.embedding, self._embedding_scale)

    def hidden(self, step: Any, batch: Batch, every: bool) -> Array | None:
        b, x = self._backend, self.embed(step)
        for layer in self._layers:
            attended = layer.attention.attend(b, step, b.rms_norm(x, layer.attention_norm, layer.eps))
            if layer is self._layers[-1] and not every:  # all K/V are written; now only wanted rows matter
                if not len(batch.outputs):
                    return None
                x, attended = b.select_outputs(step, x), b.select_outputs(step, attended)
            x = self._finish(layer, x, attended)
        return b.rms_norm(x, self._ends.norm, self._eps)

    def logits(self, hidden: Array) -> Array:
        b, logits = self._backend, self._backend.linear(hidden, self._ends.output)
        if self._softcap is not None:
            logits = b.scale(b.activate(b.scale(logits, 1 / self._softcap), "tanh"), self._softcap)
        return logits

    def _finish(self, layer: Layer, x: Array, attended: Array) -> Array:
        b = self._backend
        change = layer.attention.project(b, attended)
        if layer.attention_after is not None:
            change = b.rms_norm(change, layer.attention_after, layer.eps)
        x = b.add(x, change)
        change = layer.ffn.apply(b, b.rms_norm(x, layer.ffn_norm, layer.eps))
        if layer.ffn_after is not None:
            change = b.rms_norm(change, layer.ffn_after, layer.eps)
        return b.add(x, change)
