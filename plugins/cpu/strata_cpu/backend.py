"""The backend's operations: thin calls into the native library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Batch, Decoder, DeltaSpec, PageStore, Rotation
from strata_core.compute.reference import attention
from strata_core.compute.reference.host import HostBackend
from strata_core.errors import BackendError, OutOfMemory
from strata_core.pool.layout import PageLayout

from . import library as native
from .decoder import NativeDecoder, attention_struct, rotation_struct
from .pages import CpuPageStore
from .recurrent import States, conv_struct, delta_struct
from .slabs import Slabs
from .step import Step
from .weights import Matrix

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena
    from strata_core.weights.tensor import StoredTensor

Floats: TypeAlias = NDArray[np.float32]


class CpuBackend(HostBackend):
    """Native kernels on the CPU's vector instructions; arrays are ``numpy.ndarray`` of float32.

    Products with quantised weights are taken with activations rounded to int8 in blocks of 32; everything else is
    float32. A row's result depends on its own sequence only: not on the number of threads, nor on the rows computed
    with it, nor on how its prompt was cut into chunks. So it has the same bits whenever it is computed on the same
    kind of machine.

    :param threads: how many work, this one included.
    :param isa: the instruction set; one of :func:`strata_cpu.library.instruction_sets`.
    """

    name = "cpu"
    host_memory = True
    kv_types = ("f16", "bf16", "f32", "int8")

    def __init__(self, library: ctypes.CDLL, threads: int, isa: str):
        self._library = library
        self._engine = library.strata_open(threads, isa.encode())
        if not self._engine:
            raise BackendError(f"the system gives no {threads} threads")
        self._close = weakref.finalize(self, library.strata_close, self._engine)
        self._slabs = Slabs(library)
        self._held = 0
        self._scratch = attention.Scratch()
        self._decoders: dict[int, NativeDecoder] = {}
        self.threads, self.isa = threads, isa

    def close(self) -> None:
        self._decoders.clear()
        self._close()

    # -- memory -------------------------------------------------------------------------------------------------

    def matrix(self, *tensors: StoredTensor) -> Matrix:
        matrix = Matrix(self._library, self._engine, self._slabs, tensors)
        self._held += matrix.nbytes
        return matrix

    def vector(self, tensor: StoredTensor) -> Floats:
        values = tensor.dequantise()
        self._held += values.nbytes
        return values

    def from_host(self, values: np.ndarray) -> Floats:
        return np.array(values, np.float32, order="C")

    def to_host(self, x: Floats) -> Floats:
        return x

    def page_store(self, layout: PageLayout, chunk_pages: int, arena: Arena) -> CpuPageStore:
        return CpuPageStore(layout, chunk_pages, arena)

    def weight_bytes(self) -> int:
        return self._held

    # -- one step -----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Step:
        return Step(batch, stores)

    def embed(self, step: Step, table: Matrix, scale: float = 1.0) -> Floats:
        tokens = np.ascontiguousarray(step.batch.tokens, np.int32)
        if tokens.min() < 0 or tokens.max() >= table.edges[-1]:
            raise BackendError(f"a token is not in the vocabulary of {table.edges[-1]}")
        out = np.empty((len(tokens), table.width), np.float32)
        self._library.strata_rows(table.struct, tokens.ctypes.data, len(tokens), scale, out.ctypes.data)
        return out

    def select_outputs(self, step: Step, x: Floats) -> Floats:
        chosen: Floats = x[step.outputs]
        return chosen

    def rope(self, step: Step, x: Floats, rotation: Rotation, heads: int) -> Floats:
        x = np.ascontiguousarray(x)
        struct = rotation_struct(rotation)
        self._call("strata_rope", step.struct, struct, x.ctypes.data, heads, x.shape[1] // heads)
        return x

    def attention(
        self,
        step: Step,
        layer: tuple[int, int],
        q: Floats,
        k: Floats,
        v: Floats | None,
        spec: AttentionSpec,
        sinks: Floats | None = None,
    ) -> Floats:
        if v is None:  # values that are parts of keys are not in the kernels: the reference's, on the same pages
            pages, store = step.pages.of(layer[0], spec.window), step.stores[layer[0]]
            return attention.attend_batch(step.batch, store, pages, layer, q, k, v, spec, sinks, self._scratch)
        struct = attention_struct(spec, layer, step.stores[layer[0]].layout, sinks)
        q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
        out = np.empty((len(q), spec.heads * spec.value_dim), np.float32)
        pointers = (x.ctypes.data for x in (q, k, v, out))
        self._call("strata_attention", step.struct, struct, *pointers)
        return out

    def causal_conv(
        self, step: Step, layer: tuple[int, int], x: Floats, weight: Floats, dilation: int = 1
    ) -> Floats:
        x, taps = np.ascontiguousarray(x), np.ascontiguousarray(weight.T)
        out = np.empty_like(x)
        states = States(step, layer)
        self._call("strata_conv", states.struct, conv_struct(x, taps, dilation, out))
        return out

    def gated_delta(
        self,
        step: Step,
        layer: tuple[int, int],
        q: Floats,
        k: Floats,
        v: Floats,
        decay: Floats,
        beta: Floats,
        spec: DeltaSpec,
    ) -> Floats:
        if spec.key_dim > native.MOST_KEY_DIM:
            return super().gated_delta(step, layer, q, k, v, decay, beta, spec)
        q, k, v, factor, beta = (np.ascontiguousarray(x) for x in (q, k, v, np.exp(decay), beta))
        out = np.empty_like(v)
        states = States(step, layer)
        self._call("strata_delta", states.struct, delta_struct(spec, q, k, v, factor, beta, out))
        return out

    def top(self, scores: np.ndarray, k: int) -> np.ndarray:
        if not 1 <= k <= len(scores):
            raise ValueError(f"{len(scores)} scores have no {k} highest")
        scores = np.ascontiguousarray(scores, np.float32)
        ids = np.empty(k, np.int64)
        if self._library.strata_top(self._engine, scores.ctypes.data, len(scores), k, ids.ctypes.data):
            return super().top(scores, k)  # no memory for it, or NaN among them
        return ids

    def decode(self, step: Step, x: Floats, decoder: Decoder, outputs: int) -> Floats | None:
        if any(layer.rotation is not decoder.layers[0].rotation for layer in decoder.layers):
            return super().decode(step, x, decoder, outputs)  # the fused kernel rotates all layers alike
        native_decoder = self._decoders.get(id(decoder))
        if native_decoder is None:  # which keeps the decoder, so that its id is not given to another one
            native_decoder = self._decoders[id(decoder)] = NativeDecoder(decoder)
        struct = native_decoder.struct(step.stores)
        x = np.ascontiguousarray(x)
        logits = np.empty((outputs, native_decoder.vocabulary), np.float32)
        self._call("strata_decode", step.struct, struct, x.ctypes.data, logits.ctypes.data)
        return logits if outputs else None

    # -- primitives ---------------------------------------------------------------------------------------------

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        x = np.ascontiguousarray(x)
        out, width = np.empty_like(x), len(weight)
        pointers = x.ctypes.data, weight.ctypes.data
        self._call("strata_norm", *pointers, eps, x.size // width, width, out.ctypes.data)
        return out

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        out = np.empty((len(x), weight.edges[-1]), np.float32)
        self._project(x, weight, out, add=False)
        if bias is not None:
            out += bias
        return out

    def linear_split(
        self, x: Floats, weight: Matrix, biases: Sequence[Floats | None] | None = None
    ) -> tuple[Floats, ...]:
        out = np.empty((len(x), weight.edges[-1]), np.float32)
        struct = weight.struct if biases is None else weight.with_biases(biases)
        self._project(x, weight, out, add=False, struct=struct)
        return tuple(out[:, a:b] for a, b in zip(weight.edges, weight.edges[1:], strict=False))

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
        kind = native.ACTIVATIONS.index(activation)
        self._call("strata_gated", gate.ctypes.data, up.ctypes.data, gate.size, kind)
        return gate

    def add_linear(self, x: Floats, y: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        x = np.ascontiguousarray(x)
        self._project(y, weight, x, add=True)
        if bias is not None:
            x += bias
        return x

    def _project(
        self, x: Floats, weight: Matrix, out: Floats, *, add: bool, struct: native.Matrix | None = None
    ) -> None:
        x = np.ascontiguousarray(x)
        self._call("strata_linear", struct or weight.struct, x.ctypes.data, len(x), out.ctypes.data, int(add))

    def _call(self, function: str, *arguments: object) -> None:
        """
        :raises OutOfMemory: no memory for intermediate results.
        """
        if getattr(self._library, function)(self._engine, *arguments):
            raise OutOfMemory("no memory for the intermediate results of a step")
