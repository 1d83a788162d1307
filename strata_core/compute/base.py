"""The compute contract: what a model family may ask of a backend.

A family is written once, as calls of these operations over *opaque* arrays: it never looks inside one, and moves data
to or from the host only with :meth:`Backend.from_host` and :meth:`Backend.to_host`. Arrays are two-dimensional,
``(rows, width)``, float32 in meaning (a backend may compute in a narrower type where its conformance tolerance allows).
Rows of several sequences share one call: a :class:`Batch` says which rows belong to which sequence, at which
positions, and in which pages their K/V live.

Operations that a backend could fuse (`gated_mlp`, `add_linear`, ...) are ordinary methods whose base implementation
composes the primitives; a backend overrides those it does better. A family always calls the widest form. Projections
of the same rows (q, k and v; gate and up) are taken in as one stacked matrix, so that what is fused, repacked and how
much memory it takes is settled while loading and not in the first step.

Ordering. Everything a backend is asked to do happens, as far as later operations can tell, in the order of the calls,
except page copies between device and host (:meth:`PageStore.download`, :meth:`PageStore.upload`), which return an
:class:`Event` and are complete only when it is. One thread (the engine's) makes all calls except `Event` ones.

Recurrent state. What a layer accumulates over a sequence and is not per position lives in pages of a *state store*: one
page is the state of all such layers at one position. A step reads one page and writes another (:attr:`Span.state`), so
a state never changes once it was written: keeping one is holding its page, and a step that failed can be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from strata_core.compute.batch import NO_STATE, Batch, Span
from strata_core.compute.pages import Event, PageStore
from strata_core.compute.scoring import Scoring
from strata_core.compute.specs import (
    Array,
    AttentionSpec,
    Decoder,
    DecoderLayer,
    DeltaSpec,
    ExpertSpec,
    Indexer,
    Rotation,
    Router,
)
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena
    from strata_core.weights.tensor import StoredTensor

__all__ = [
    "NO_STATE", "Array", "AttentionSpec", "Backend", "BackendFactory", "BackendOptions", "Batch", "Decoder",
    "DecoderLayer", "DeltaSpec", "Event", "ExpertSpec", "Indexer", "PageStore", "Probe", "Rotation",
    "Router", "Span",
]


class Backend(Scoring, ABC):
    """Arithmetic and memory of one device. See the module's docstring for the rules, and :class:`Scoring` for what a
    backend does with logits on the host.

    :cvar name: what ``--backend`` calls it.
    :cvar host_memory: pages are in memory the host reads directly, so that parking to RAM copies nothing.
    :cvar kv_types: K/V types it can attend over, its default first.
    """

    name: str
    host_memory: bool
    kv_types: tuple[str, ...]

    # -- memory -------------------------------------------------------------------------------------------------

    @abstractmethod
    def matrix(self, *tensors: StoredTensor) -> Array:
        """Take in a weight matrix ``(out_features, in_features)``, as stored or repacked.

        Several tensors of equal ``in_features`` are stacked in the order given: one matrix whose ``out_features`` is
        the sum of theirs. Their types may differ. The caller keeps the result for as long as the model lives.

        :raises OutOfMemory: it does not fit.
        :raises UnsupportedModel: the backend cannot use a tensor of this type.
        """

    def table(self, tensor: StoredTensor) -> Array:
        """Take in an embedding table ``(vocab, width)`` that only :meth:`embed` uses, row by row.

        A table that is also the output projection is taken in once, with :meth:`matrix`.
        """
        return self.matrix(tensor)

    @abstractmethod
    def vector(self, tensor: StoredTensor) -> Array:
        """Take in a weight vector (norm weights, biases) as float32."""

    @abstractmethod
    def from_host(self, values: np.ndarray) -> Array:
        """A new array with the float32 values of a host array ``(rows, width)``."""

    @abstractmethod
    def to_host(self, x: Array) -> np.ndarray:
        """The array's values as a float32 host array; waits for what computes them."""

    @abstractmethod
    def page_store(self, layout: PageLayout, chunk_pages: int, arena: Arena) -> PageStore:
        """Storage for pages of this layout; ``arena`` gives host memory to backends that use it."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that matrices and vectors taken in so far hold, beyond the mapped model file."""

    def free_bytes(self) -> int | None:
        """Bytes that page stores could still take in this backend's own memory; None (the default) where that is the
        host's, or cannot be asked."""
        return None

    def close(self) -> None:
        """Free everything. The backend is not used afterwards."""

    # -- one step -----------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Any:
        """Start a step: returns what the operations below take as ``step`` (positions and page tables where the
        backend needs them). ``stores`` are in the order of the model's layouts."""

    @abstractmethod
    def embed(self, step: Any, table: Array, scale: float = 1.0) -> Array:
        """Rows of ``table`` (from :meth:`table` or :meth:`matrix`) of the batch's tokens, times ``scale``:
        ``(rows, width)``."""

    @abstractmethod
    def select_outputs(self, step: Any, x: Array) -> Array:
        """The rows of ``x`` that the batch wants logits of: ``(len(outputs), width)``."""

    @abstractmethod
    def rope(self, step: Any, x: Array, rotation: Rotation, heads: int) -> Array:
        """Rotate every head of ``x`` ``(rows, heads * head_dim)`` by its row's position (Su et al. 2021).

        The angle is the *float32* product of position and inverse frequency, as in the models' own code: at position
        8192 it is off by up to 0.0005, so a backend that rounds otherwise would rotate by visibly other angles.
        May reuse the memory of ``x``, which the caller does not use again.
        """

    @abstractmethod
    def attention(
        self, step: Any, layer: tuple[int, int], q: Array, k: Array, v: Array | None, spec: AttentionSpec,
        sinks: Array | None = None,
    ) -> Array:
        """Write ``k`` and ``v`` of every row into its page, then attend: ``(rows, heads * value_dim)``.

        :param layer: (number of the page layout, number of the layer within it).
        :param q: ``(rows, heads * head_dim)``; head ``h`` attends K/V head ``h // (heads // kv_heads)``.
        :param k: ``(rows, kv_heads * head_dim)``; :param v: ``(rows, kv_heads * value_dim)``, None where
            ``spec.latent``.
        :param sinks: :meth:`vector` of a tensor ``(heads,)``: a score of each head, neither scaled nor capped, that
            takes part in its softmax and has no value (Xiao et al. 2023, as learned in gpt-oss); None for none.

        A row sees what was written, in the K/V type of the store: also its own K/V go through that type.
        """

    @abstractmethod
    def indexed_attention(
        self, step: Any, layer: tuple[int, int], q: Array, k: Array, v: Array, spec: AttentionSpec,
        index_q: Array, index_k: Array, indexer: Indexer,
    ) -> Array:
        """:meth:`attention` over chosen positions only; the rows' index keys are written to the pages too.

        The layout has a part for them (``index_dim`` of :meth:`PageLayout.attention`); ``spec`` has no window.

        :param index_q: ``(rows, indexer.heads * indexer.dim)``, normed and rotated.
        :param index_k: ``(rows, indexer.dim)``, as projected.
        """

    @abstractmethod
    def causal_conv(self, step: Any, layer: tuple[int, int], x: Array, weight: Array, dilation: int = 1) -> Array:
        """Depthwise convolution along each sequence, with zeros before its beginning: ``(rows, channels)``,
        ``y[t, c] = sum_j weight[c, j] * x[t - (kernel-1-j) * dilation, c]``.

        :param layer: (number of the state store, number of the state in it): the last ``(kernel-1) * dilation`` rows of
            ``x``, oldest first; a part ``(1, 1, (kernel-1) * dilation * channels)``.
        :param weight: :meth:`vector` of a tensor ``(channels, kernel)``.
        """

    @abstractmethod
    def gated_delta(
        self, step: Any, layer: tuple[int, int], q: Array, k: Array, v: Array, decay: Array, beta: Array,
        spec: DeltaSpec,
    ) -> Array:
        """Gated delta rule (Yang et al. 2024), for every value head and row in order of positions:
        ``S = exp(decay) * S``, ``S = S + k^T (beta * (v - k S))``, ``y = q S``: ``(rows, value_heads * value_dim)``.

        :param layer: (number of the state store, number of the state in it): S of each value head, a part
            ``(value_heads, 1, key_dim * value_dim)``.
        :param q: ``(rows, key_heads * key_dim)``, scaled as the model wants it; :param k: the same.
        :param v: ``(rows, value_heads * value_dim)``.
        :param decay: ``(rows, value_heads)``, natural logarithm of the factor, at most 0; :param beta: the same shape.
        """

    # -- mixture of experts -------------------------------------------------------------------------------------

    @abstractmethod
    def experts(
        self, gate: StoredTensor, up: StoredTensor | None, down: StoredTensor,
        gate_up_bias: StoredTensor | None = None, down_bias: StoredTensor | None = None,
    ) -> Array:
        """Take in the experts of a layer; the result is for :meth:`mixture`.

        :param gate: ``(experts, ffn, width)``, or with ``up`` None both, gate first: ``(experts, 2 * ffn, width)``.
        :param down: ``(experts, width, ffn)``.
        :param gate_up_bias: ``(experts, 2 * ffn)``; :param down_bias: ``(experts, width)``.
        """

    @abstractmethod
    def route(self, x: Array, router: Router) -> tuple[np.ndarray, np.ndarray]:
        """Choose experts: int32 ``(rows, top)`` ids and float32 ``(rows, top)`` weights, on the host. Waits for ``x``.

        Of equal scores the lower id wins. The order within a row means nothing.
        """

    @abstractmethod
    def mixture(
        self, x: Array, ids: np.ndarray, weights: np.ndarray, experts: Array, spec: ExpertSpec
    ) -> Array:
        """``sum_j weights[r, j] * expert[ids[r, j]](x[r])``: ``(rows, width)``."""

    # -- elementwise --------------------------------------------------------------------------------------------

    @abstractmethod
    def activate(self, x: Array, activation: str) -> Array:
        """``silu``, ``gelu_tanh``, ``sigmoid``, ``softplus``, ``relu``, ``tanh`` or ``signed_root`` of all elements.
        May reuse ``x``. ``signed_root`` is ``sign(x) * sqrt(max(|x|, 1e-6))``, 0 of 0."""

    @abstractmethod
    def multiply(self, x: Array, y: Array) -> Array:
        """Product. ``y`` is as wide as ``x``, or ``n`` wide: then its column ``i`` multiplies group ``i`` of the ``n``
        equal groups of columns of ``x``; and has as many rows, or is a :meth:`vector`: the same for all rows. May reuse
        ``x``."""

    @abstractmethod
    def shift(self, x: Array, vector: Array) -> Array:
        """``x + vector`` in every row. May reuse ``x``."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """``factor * x``. May reuse ``x``."""

    @abstractmethod
    def split(self, x: Array, widths: Sequence[int], heads: int = 1) -> tuple[Array, ...]:
        """Cut each of ``heads`` equal groups of columns into parts of these widths: part ``i`` of all groups, side by
        side, is ``(rows, heads * widths[i])``. May share the memory of ``x``, which the caller does not use again."""

    @abstractmethod
    def join(self, parts: Sequence[Array], heads: int = 1) -> Array:
        """The reverse of :meth:`split`: parts ``(rows, heads * width)``, joined within each of ``heads`` groups."""

    @abstractmethod
    def repeat(self, x: Array, times: int) -> Array:
        """The columns of ``x``, ``times`` times side by side."""

    @abstractmethod
    def fold(self, x: Array, groups: int) -> Array:
        """Sum of the ``groups`` equal groups of columns: ``(rows, width / groups)``."""

    @abstractmethod
    def group_dot(self, x: Array, y: Array, groups: int) -> Array:
        """Dot products of the ``groups`` equal groups of columns of ``x`` with those of ``y``: ``(rows, groups)``."""

    @abstractmethod
    def l2_norm(self, x: Array, width: int, eps: float) -> Array:
        """``x / sqrt(sum(x^2) + eps)`` over groups of ``width`` columns."""

    @abstractmethod
    def head_linear(self, x: Array, weight: Array) -> Array:
        """A matrix for each head: ``(rows, heads * in)`` to ``(rows, heads * out)``.

        :param weight: :meth:`vector` of a tensor ``(heads, out, in)``.
        """

    # -- primitives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x^2) + eps) * weight`` over groups of ``len(weight)`` elements (Zhang & Sennrich 2019).

        The groups are whole rows for a layer norm and heads for a per-head norm.
        """

    @abstractmethod
    def group_norm(self, x: Array, weight: Array, groups: int, eps: float) -> Array:
        """:meth:`rms_norm` of each of ``groups`` equal groups of columns, times a weight of its own: ``weight`` is as
        long as a row."""

    @abstractmethod
    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """``x @ weight.T + bias``: ``(rows, in_features)`` to ``(rows, out_features)``."""

    @abstractmethod
    def linear_split(
        self, x: Array, weight: Array, biases: Sequence[Array | None] | None = None
    ) -> tuple[Array, ...]:
        """:meth:`linear`, as one array (and one bias or None) for each tensor that ``weight`` was stacked from."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """Elementwise sum; may reuse the memory of ``x``, which the caller does not use again."""

    @abstractmethod
    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        """``activation(gate) * up``; activations: ``silu``, ``gelu_tanh``. May reuse the memory of ``gate``."""

    # -- wider forms, composed here -----------------------------------------------------------------------------

    def add_linear(self, x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
        """Residual: ``x + y @ weight.T + bias``; may reuse the memory of ``x``."""
        return self.add(x, self.linear(y, weight, bias))

    def gated_mlp(self, x: Array, gate_up: Array, down: Array, activation: str) -> Array:
        """``(activation(x @ gate.T) * (x @ up.T)) @ down.T`` (Shazeer 2020).

        :param gate_up: the two matrices, stacked in this order.
        """
        gate, up = self.linear_split(x, gate_up)
        return self.linear(self.gated(gate, up, activation), down)

    def decode(self, step: Any, x: Array, decoder: Decoder, outputs: int) -> Array | None:
        """Run all layers: every row's K/V are written, and rows with wanted logits go on to the output.

        May be handed the same decoder in every step, so a backend can keep what it derives from one.

        :param x: ``(rows, width)`` embedded tokens; its memory may be reused, the caller does not use it again.
        :param outputs: how many rows' logits are wanted, as the step's batch says.
        :returns: logits ``(outputs, vocabulary)``; None where none are wanted.
        """
        for layer in decoder.layers:
            normed = self.rms_norm(x, layer.attention_norm, layer.eps)
            q, k, v = self.linear_split(normed, layer.qkv, layer.qkv_biases)
            if layer.q_norm is not None:
                q = self.rms_norm(q, layer.q_norm, layer.eps)
            if layer.k_norm is not None:
                k = self.rms_norm(k, layer.k_norm, layer.eps)
            q = self.rope(step, q, layer.rotation, layer.spec.heads)
            k = self.rope(step, k, layer.rotation, layer.spec.kv_heads)
            attended = self.attention(step, layer.cache, q, k, v, layer.spec)
            if layer is decoder.layers[-1]:  # all K/V are written; from here on only wanted rows matter
                if not outputs:
                    return None
                x, attended = self.select_outputs(step, x), self.select_outputs(step, attended)
            x = self.add_linear(x, attended, layer.output, layer.output_bias)
            normed = self.rms_norm(x, layer.ffn_norm, layer.eps)
            x = self.add(x, self.gated_mlp(normed, layer.gate_up, layer.down, layer.activation))
        return self.linear(self.rms_norm(x, decoder.norm, decoder.eps), decoder.output)


@attrs.frozen
class Probe:
    """What a backend's probe found: whether it can be used here, and one line of why or of what it found."""

    usable: bool
    detail: str


@attrs.frozen
class BackendOptions:
    """Settings that concern any backend.

    :ivar threads: worker threads for host arithmetic; 0 = as many as the machine has physical cores.
    """

    threads: int = 0


@attrs.frozen
class BackendFactory:
    """What ``strata_register_backends`` registers.

    :ivar priority: the usable backend of the highest priority is the automatic choice (reference 0).
    :ivar probe: looks for libraries and devices; imports vendor libraries itself; returns, never raises, "not here".
    :ivar create: makes the backend; raises BackendError if it cannot.
    """

    name: str
    priority: int
    probe: Callable[[], Probe] = attrs.field(repr=False)
    create: Callable[[BackendOptions], Backend] = attrs.field(repr=False)
