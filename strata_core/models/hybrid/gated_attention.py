"""Attention whose result is gated by a projection of its input (Qwen3-Next), over all positions or chosen ones.

``attn_q`` holds for each head its query and its gate. Queries and keys are RMS-normed per head and partly rotated, in
halves ("NeoX").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from strata_core.compute.base import Array, AttentionSpec, Backend, Indexer, Rotation
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.mtp import write_only

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


@attrs.frozen
class IndexSizes:
    """Shape of an indexer; see :class:`strata_core.compute.base.Indexer`."""

    heads: int
    dim: int
    block: int
    top: int


@attrs.frozen(eq=False)
class GatedAttention:
    """One layer. Weights are the backend's arrays.

    :ivar projections: queries with gates, keys, values and, with an indexer, index queries and keys, stacked.
    :ivar cache: (number of the page layout, number of the layer within it).
    :ivar index_norm: weight of the norm of index queries.
    :ivar stored: the projections without those of queries, of a layer whose rows are also stored without attending:
        queries are the most of what is projected.
    """

    backend: Backend
    spec: AttentionSpec
    rotation: Rotation
    cache: tuple[int, int]
    projections: Array
    q_norm: Array
    k_norm: Array
    eps: float
    output: Array
    indexer: Indexer | None = None
    index_norm: Array | None = None
    stored: Array | None = None

    @classmethod
    def load(
        cls,
        source: WeightSource,
        backend: Backend,
        sizes: HybridSizes,
        number: int,
        rotation: Rotation,
        index: IndexSizes | None = None,
        stores: bool = False,
    ) -> GatedAttention:
        """
        :param stores: whether :meth:`store` will be called.
        :raises ModelFileError: a tensor is missing or has another shape.
        """
        spec, width, prefix = sizes.attention, sizes.width, f"blk.{number}."
        rows = {
            "attn_q": 2 * spec.heads * spec.head_dim,
            "attn_k": spec.kv_heads * spec.head_dim,
            "attn_v": spec.kv_heads * spec.value_dim,
        }
        if index is not None:
            rows |= {"indexer.q_proj": index.heads * index.dim, "indexer.k_proj": index.dim}

        def norm(name: str, elements: int) -> Array:
            return backend.vector(source.require(f"{prefix}{name}.weight", (elements,)))

        def matrix(*names: str) -> Array:
            return backend.matrix(*(source.require(f"{prefix}{name}.weight", (rows[name], width)) for name in names))

        kept = [name for name in rows if name in ("attn_k", "attn_v", "indexer.k_proj")]
        indexer = index_norm = None
        if index is not None:
            key_norm, index_norm = norm("indexer.k_norm", index.dim), norm("indexer.q_norm", index.dim)
            indexer = Indexer(index.heads, index.dim, index.block, index.top, key_norm, sizes.decoder.eps, rotation)
        return cls(
            backend=backend,
            spec=spec,
            rotation=rotation,
            cache=(0, number // sizes.interval),
            projections=matrix(*rows),
            q_norm=norm("attn_q_norm", spec.head_dim),
            k_norm=norm("attn_k_norm", spec.head_dim),
            eps=sizes.decoder.eps,
            output=backend.matrix(source.require(prefix + "attn_output.weight", (width, spec.heads * spec.value_dim))),
            indexer=indexer,
            index_norm=index_norm,
            stored=matrix(*kept) if stores else None,
        )

    def forward(self, step: Any, x: Array) -> Array:
        """``(rows, width)`` to ``(rows, width)``; writes the rows' K/V."""
        b, spec = self.backend, self.spec
        queries, k, v, *index = b.linear_split(x, self.projections)
        q, gate = b.split(queries, [spec.head_dim, spec.head_dim], heads=spec.heads)
        q = b.rope(step, b.rms_norm(q, self.q_norm, self.eps), self.rotation, spec.heads)
        k = b.rope(step, b.rms_norm(k, self.k_norm, self.eps), self.rotation, spec.kv_heads)
        if self.indexer is None:
            attended = b.attention(step, self.cache, q, k, v, spec)
        else:
            index_q = b.rms_norm(index[0], self.index_norm, self.eps)
            index_q = b.rope(step, index_q, self.rotation, self.indexer.heads)
            attended = b.indexed_attention(step, self.cache, q, k, v, spec, index_q, index[1], self.indexer)
        return b.linear(b.multiply(b.activate(gate, "sigmoid"), attended), self.output)

    def store(self, step: Any, x: Array) -> None:
        """Write the K/V of the rows of ``x``, and no more."""
        b, spec = self.backend, write_only(self.spec)
        k, v, *index = b.linear_split(x, self.stored)
        k = b.rope(step, b.rms_norm(k, self.k_norm, self.eps), self.rotation, spec.kv_heads)
        if self.indexer is None:
            b.attention(step, self.cache, k, k, v, spec)
            return
        # There is no window where an indexer chooses: a row attends the one block that its own index key likes best.
        least = attrs.evolve(self.indexer, heads=1, top=1)
        b.indexed_attention(
            step, self.cache, k, k, v, attrs.evolve(spec, window=None), index[0], index[0], least
        )
