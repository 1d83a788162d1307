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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena
    from strata_core.weights.tensor import StoredTensor

#: A backend's own array type. Only the backend looks inside; others pass it on.
Array = Any


@attrs.frozen(eq=False)
class Span:
    """Consecutive rows of a batch that belong to one sequence.

    :ivar start: position of the first row (0 = first token of the sequence).
    :ivar rows: number of rows, at least 1; they are at positions ``start .. start + rows - 1``.
    :ivar tables: one int32 page table per page layout of the model, each covering positions ``0 .. start + rows - 1``:
        the K/V of position ``p`` live in page ``tables[layout][p // page_tokens]``, row ``p % page_tokens``.
    """

    start: int
    rows: int
    tables: tuple[np.ndarray, ...]


@attrs.frozen(slots=False, eq=False)
class Batch:
    """The rows of one step.

    :ivar tokens: int32 ``(rows,)`` token ids, span after span.
    :ivar spans: the sequences, in row order; no sequence appears twice. Two spans may share pages only below both
        their starts (those are only read).
    :ivar outputs: int32 row indices, ascending, whose logits are wanted.
    """

    tokens: np.ndarray
    spans: tuple[Span, ...]
    outputs: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 ``(rows,)``: the position of every row in its sequence."""
        return np.concatenate([np.arange(s.start, s.start + s.rows, dtype=np.int32) for s in self.spans])

    @cached_property
    def offsets(self) -> np.ndarray:
        """int32 ``(spans + 1,)``: first row of every span, and the number of rows."""
        return np.concatenate([[0], np.cumsum([s.rows for s in self.spans])]).astype(np.int32)


@attrs.frozen(eq=False)
class Rotation:
    """Rotary position embedding of one kind of layer.

    :ivar inverse_frequencies: float32 ``(rotated / 2,)``: angle per position of each pair, all scaling applied.
    :ivar interleaved: pairs are elements ``(2i, 2i + 1)`` if true, ``(i, i + rotated / 2)`` ("NeoX") otherwise.
    :ivar magnitude: factor on the rotated elements (YaRN's attention factor); 1.0 for none.
    """

    inverse_frequencies: np.ndarray
    interleaved: bool
    magnitude: float = 1.0

    @property
    def rotated(self) -> int:
        """How many leading elements of a head are rotated; the rest pass through."""
        return 2 * len(self.inverse_frequencies)


@attrs.frozen
class AttentionSpec:
    """Shape and variant of an attention layer: ``softmax(scale * q k^T) v`` over positions ``<= `` the row's own.

    :ivar scale: factor on the scores, usually ``head_dim ** -0.5``.
    :ivar window: only the last ``window`` positions (the row's own included) are attended; None for all.
    :ivar softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; None for none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@attrs.frozen(eq=False)
class DecoderLayer:
    """A pre-norm layer: attention, then a gated MLP, each added to its input. Weights are the backend's arrays.

    :ivar qkv: the three projections, stacked; :ivar qkv_biases: a bias or None for each.
    :ivar cache: (number of the page layout, number of the layer within it), as in :meth:`Backend.attention`.
    :ivar gate_up: the two matrices, stacked in this order.
    :ivar eps: of both norms.
    """

    attention_norm: Array
    qkv: Array
    qkv_biases: tuple[Array | None, Array | None, Array | None]
    rotation: Rotation
    spec: AttentionSpec
    cache: tuple[int, int]
    output: Array
    output_bias: Array | None
    ffn_norm: Array
    gate_up: Array
    down: Array
    activation: str
    eps: float


@attrs.frozen(eq=False)
class Decoder:
    """Everything between embedded rows and logits: at least one layer, the last norm, the output projection."""

    layers: tuple[DecoderLayer, ...]
    norm: Array
    eps: float
    output: Array


class Event(ABC):
    """Completion of a page copy. May be used from any thread."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy is complete; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the copy is complete.

        :raises BackendError: the copy failed.
        """


class PageStore(ABC):
    """Memory of one pool's pages, in chunks of ``chunk_pages`` pages.

    Page ``p`` lives in chunk ``p // chunk_pages``. Chunks come and go; a page of an absent chunk must not be named.
    New pages hold undefined bytes. While an upload to a page is not done, nothing else may name the page; while a
    download of it is not done, it may only be read; its chunk must not be dropped before either is done.
    """

    layout: PageLayout
    chunk_pages: int

    @abstractmethod
    def add_chunk(self, chunk: int) -> None:
        """Make the pages of chunk number ``chunk`` usable.

        :raises OutOfMemory: the memory is not there; nothing changed.
        """

    @abstractmethod
    def drop_chunk(self, chunk: int) -> None:
        """Give the chunk's memory back to the system."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Copy one page to another, in order with the operations around it."""

    @abstractmethod
    def download(self, pages: Sequence[int], target: np.ndarray) -> Event:
        """Copy pages to host memory: row ``i`` of ``target`` (uint8 ``(n, layout.nbytes)``) receives ``pages[i]``.

        The pages are read as all operations called before leave them. The caller keeps pages and ``target`` untouched
        until the event is done.
        """

    @abstractmethod
    def upload(self, source: np.ndarray, pages: Sequence[int]) -> Event:
        """Copy host memory to pages, the reverse of :meth:`download`.

        The caller names the pages in a step only after the event is done, and keeps ``source`` untouched until then.
        """

    def host_view(self, page: int) -> np.ndarray | None:
        """The page's own memory as a uint8 ``(layout.nbytes,)`` view, where it is the host's; None otherwise."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free all chunks."""


class Backend(ABC):
    """Arithmetic and memory of one device. See the module's docstring for the rules.

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

    def close(self) -> None:  # noqa: B027 - nothing to free is a valid backend
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
        self, step: Any, layer: tuple[int, int], q: Array, k: Array, v: Array, spec: AttentionSpec
    ) -> Array:
        """Write ``k`` and ``v`` of every row into its page, then attend: ``(rows, heads * value_dim)``.

        :param layer: (number of the page layout, number of the layer within it).
        :param q: ``(rows, heads * head_dim)``; head ``h`` attends K/V head ``h // (heads // kv_heads)``.
        :param k: ``(rows, kv_heads * head_dim)``; :param v: ``(rows, kv_heads * value_dim)``.

        A row sees what was written, in the K/V type of the store: also its own K/V go through that type.
        """

    # -- primitives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x^2) + eps) * weight`` over groups of ``len(weight)`` elements (Zhang & Sennrich 2019).

        The groups are whole rows for a layer norm and heads for a per-head norm.
        """

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
