"""Models whose layers are all those of :class:`strata_core.compute.base.Decoder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strata_core.compute.base import AttentionSpec, Backend, Batch, Decoder, DecoderLayer, PageStore, Rotation
from strata_core.models.base import Geometry, Model
from strata_core.models.config import DecoderConfig, identity_of
from strata_core.models.loading import Block, Ends
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


class DenseModel(Model):
    """A pre-norm decoder with rotary grouped-query attention and gated SiLU; one kind of pages: full attention.

    Biases of the attention's projections are applied where the file has them.

    :param interleaved: how the rows of ``attn_q`` and ``attn_k`` are ordered, see :class:`Rotation`.
    :param head_norms: queries and keys are normed head by head before they are rotated.
    """

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        architecture: str,
        config: DecoderConfig,
        *,
        interleaved: bool,
        head_norms: bool = False,
    ):
        c = self._config = config
        self._backend, self._head_norms = backend, head_norms
        ends = Ends.load(source, backend, c.width)
        self._embedding = ends.embedding
        rotation = self._rotation = c.rope.rotation(interleaved=interleaved)
        layers = tuple(self._layer(Block(source, backend, number), rotation) for number in range(c.layers))
        self._decoder = Decoder(layers, ends.norm, c.eps, ends.output)
        self.geometry = Geometry(architecture, c.layers, c.width, ends.vocab, c.context)

    def _layer(self, block: Block, rotation: Rotation) -> DecoderLayer:
        c = self._config
        attention_norm = block.vector("attn_norm.weight", c.width)
        qkv, biases = block.qkv(c)
        return DecoderLayer(
            attention_norm=attention_norm,
            qkv=qkv,
            qkv_biases=biases,
            q_norm=block.vector("attn_q_norm.weight", c.head_dim) if self._head_norms else None,
            k_norm=block.vector("attn_k_norm.weight", c.head_dim) if self._head_norms else None,
            rotation=rotation,
            spec=AttentionSpec(c.heads, c.kv_heads, c.head_dim, c.value_dim, c.attention_scale),
            cache=(0, block.number),
            output=block.matrix(c.heads * c.value_dim, attn_output=c.width),
            output_bias=block.optional("attn_output.bias", c.width),
            ffn_norm=block.vector("ffn_norm.weight", c.width),
            gate_up=block.matrix(c.width, ffn_gate=c.ffn, ffn_up=c.ffn),
            down=block.matrix(c.ffn, ffn_down=c.width),
            activation="silu",
            eps=c.eps,
        )

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return (self._config.layout(self._config.layers, kv_type, page_tokens),)

    def identity(self) -> Mapping[str, str | int | float]:
        return identity_of(self.geometry.architecture, self._config, rope=self._rotation)

    def forward(self, batch: Batch, stores: Sequence[PageStore]) -> np.ndarray:
        b = self._backend
        step = b.begin(batch, stores)
        x = b.embed(step, self._embedding, self._config.embedding_scale)
        logits = b.decode(step, x, self._decoder, len(batch.outputs))
        return np.empty((0, self.geometry.vocab), np.float32) if logits is None else b.to_host(logits)
