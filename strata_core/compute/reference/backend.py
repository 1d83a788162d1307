"""The reference backend's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Batch, PageStore, Rotation
from strata_core.compute.reference import attention
from strata_core.compute.reference.host import HostBackend
from strata_core.compute.reference.kv import Floats
from strata_core.compute.reference.pages import NumpyPageStore
from strata_core.compute.reference.weights import Matrix
from strata_core.errors import BackendError
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.memory.arena import Arena
    from strata_core.weights.tensor import StoredTensor

class Step:
    """What the operations of one step share, worked out once and used by every layer."""

    def __init__(self, batch: Batch, stores: Sequence[PageStore]):
        if not all(isinstance(store, NumpyPageStore) for store in stores):
            raise BackendError("the numpy backend can only use page stores that it made")
        self.batch = batch
        self.stores: tuple[NumpyPageStore, ...] = tuple(stores)  # type: ignore[arg-type]  # checked above
        self._rotations: dict[int, tuple[Rotation, NDArray[np.complex64]]] = {}
        self.pages = attention.StepPages(batch, self.stores)

    def turns(self, rotation: Rotation) -> NDArray[np.complex64]:
        """``magnitude * exp(i * angle)`` of every row and pair, ``(rows, rotated / 2)``."""
        known = self._rotations.get(id(rotation))
        if known is None:
            angles = self.batch.positions[:, None].astype(np.float32) * rotation.inverse_frequencies
            # The rotation is kept with its turns, so that its id is not given to another one.
            known = rotation, (rotation.magnitude * np.exp(1j * angles)).astype(np.complex64)
            self._rotations[id(rotation)] = known
        return known[1]


class NumpyBackend(HostBackend):
    """All arithmetic in float32 with numpy; arrays are ``numpy.ndarray`` of float32.

    The same batch gives the same bits. Matrix products run on the BLAS that numpy was built with and on its threads
    (environment variable ``OPENBLAS_NUM_THREADS`` for the wheels from PyPI, read when numpy is imported); everything
    else runs on one thread.

    Weights are dequantised to float32 when they are taken in, as long as ``keep_bytes`` allows; later ones stay
    as stored and are dequantised in blocks of rows in each use, which is slow and needs no memory.

    :param keep_bytes: most bytes of weights to hold as float32; None for no bound.
    """

    name = "numpy"
    host_memory = True
    kv_types = ("f32", "f16", "bf16", "int8")

    def __init__(self, keep_bytes: int | None = None):
        self.keep_bytes = keep_bytes
        self._held = 0
        self._scratch = attention.Scratch()

    # -- memory -------------------------------------------------------------------------------------------------

    def matrix(self, *tensors: StoredTensor) -> Matrix:
        matrix = Matrix(tensors)
        if self.keep_bytes is None or self._held + matrix.nbytes <= self.keep_bytes:
            matrix.make_dense()
            self._held += matrix.nbytes
        return matrix

    def table(self, tensor: StoredTensor) -> Matrix:
        return Matrix([tensor])  # only rows of it are ever needed

    def vector(self, tensor: StoredTensor) -> Floats:
        values = tensor.dequantise()
        self._held += values.nbytes
        return values

    def from_host(self, values: np.ndarray) -> Floats:
        return np.array(values, np.float32)

    def to_host(self, x: Floats) -> Floats:
        return x

    def page_store(self, layout: PageLayout, chunk_pages: int, arena: Arena) -> NumpyPageStore:
        return NumpyPageStore(layout, chunk_pages, arena)

    def weight_bytes(self) -> int:
        return self._held

    # -- one step -----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Step:
        return Step(batch, stores)

    def embed(self, step: Step, table: Matrix, scale: float = 1.0) -> Floats:
        x = table.rows(step.batch.tokens)
        if scale != 1.0:
            x *= np.float32(scale)
        return x

    def select_outputs(self, step: Step, x: Floats) -> Floats:
        chosen: Floats = x[step.batch.outputs]
        return chosen

    def rope(self, step: Step, x: Floats, rotation: Rotation, heads: int) -> Floats:
        turns = step.turns(rotation)[:, None, :]
        rows, width = x.shape
        split = x.reshape(rows, heads, width // heads)
        if rotation.interleaved:
            # A pair is a complex number, and rotating it a product. The view needs pairs that are side by side.
            pairs = np.ascontiguousarray(split[..., : rotation.rotated]).view(np.complex64)
            split[..., : rotation.rotated] = (pairs * turns).view(np.float32)
            return split.reshape(rows, width)
        half = rotation.rotated // 2
        first, second = split[..., :half].copy(), split[..., half : rotation.rotated].copy()
        split[..., :half] = first * turns.real - second * turns.imag
        split[..., half : rotation.rotated] = second * turns.real + first * turns.imag
        return split.reshape(rows, width)

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
        pages = step.pages.of(layer[0], spec.window)
        store = step.stores[layer[0]]
        return attention.attend_batch(step.batch, store, pages, layer, q, k, v, spec, sinks, self._scratch)

    # -- primitives ---------------------------------------------------------------------------------------------

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        groups = x.reshape(-1, len(weight))
        scale = np.einsum("ij,ij->i", groups, groups)
        scale /= np.float32(len(weight))
        scale += np.float32(eps)
        np.sqrt(scale, out=scale)
        out: Floats = groups / scale[:, None]
        out *= weight
        return out.reshape(x.shape)

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        out = weight.project(x)
        if bias is not None:
            out += bias
        return out

    def linear_split(
        self, x: Floats, weight: Matrix, biases: Sequence[Floats | None] | None = None
    ) -> tuple[Floats, ...]:
        out = weight.project(x)
        parts = tuple(out[:, a:b] for a, b in zip(weight.edges, weight.edges[1:], strict=False))
        for part, bias in zip(parts, biases or (), strict=False):
            if bias is not None:
                part += bias
        return parts
