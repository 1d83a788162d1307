"""The ``gemma3`` family, text part (Gemma Team 2025).

Norms before and after both halves of a layer, norms of query and key heads, GELU, embeddings scaled by the square root
of their width. Most layers attend a sliding window and rotate with a base of their own. Norm weights are stored with
the one that the model's own files leave out already added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import AttentionSpec, Backend
from strata_core.models.base import Family, Geometry, ModelOptions
from strata_core.models.config import DecoderConfig, identity_of
from strata_core.models.keys import Keys
from strata_core.models.loading import Block, Ends
from strata_core.models.rope import plain_rotation
from strata_core.models.stack import GatedFeedForward, GroupedAttention, Layer, StackModel
from strata_core.models.windows import Windows
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "gemma3"

#: Layers of the 27B model, whose files do not say that its scores are scaled by width / heads, not by head_dim.
_LAYERS_27B = 62


@attrs.frozen
class GemmaConfig:
    """:ivar score_cap: of attention scores; :ivar logit_cap: of logits; 0 for none."""

    windows: Windows
    score_cap: float
    logit_cap: float
    attention_scale: float
    embedding_scale: float

    @classmethod
    def read(cls, keys: Keys, c: DecoderConfig) -> GemmaConfig:
        """:raises ModelFileError: a key is missing or impossible."""
        scale = c.attention_scale
        if "attention.scale" not in keys and c.layers == _LAYERS_27B:
            scale = (c.width / c.heads) ** -0.5
        return cls(
            windows=Windows.read(keys, c.layers, period=6),
            score_cap=keys.number("attn_logit_softcapping", 0.0),
            logit_cap=keys.number("final_logit_softcapping", 0.0),
            attention_scale=scale,
            embedding_scale=c.width**0.5,
        )


class Gemma3Model(StackModel):
    """See the module's docstring. Two kinds of pages: full attention, sliding windows."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        c = self._config = DecoderConfig.read(keys, options, rope_keys=("freq_base_swa",))
        keys.size("feed_forward_length")
        g = self._gemma = GemmaConfig.read(keys, c)
        near_base = keys.number("rope.freq_base_swa", 10_000.0)
        keys.refuse_others()
        self._backend, self._eps = backend, c.eps
        self._embedding_scale, self._softcap = g.embedding_scale, g.logit_cap or None
        self._far = c.rope.rotation(interleaved=False)
        self._near = plain_rotation(c.rope.rotated, near_base, interleaved=False)
        self._ends = Ends.load(source, backend, c.width)
        self._layers = tuple(self._layer(Block(source, backend, number)) for number in range(c.layers))
        self.geometry = Geometry(ARCHITECTURE, c.layers, c.width, self._ends.vocab, c.context)

    def _layer(self, block: Block) -> Layer:
        c, g = self._config, self._gemma
        window = g.windows.of(block.number)
        qkv, biases = block.qkv(c)
        attention = GroupedAttention(
            qkv=qkv,
            qkv_biases=biases,
            q_norm=block.vector("attn_q_norm.weight", c.head_dim),
            k_norm=block.vector("attn_k_norm.weight", c.head_dim),
            rotation=self._far if window is None else self._near,
            spec=AttentionSpec(
                c.heads, c.kv_heads, c.head_dim, c.value_dim, g.attention_scale, window, g.score_cap or None
            ),
            cache=g.windows.cache(block.number),
            output=block.matrix(c.heads * c.value_dim, attn_output=c.width),
            output_bias=block.optional("attn_output.bias", c.width),
            eps=c.eps,
        )
        gate_up = block.matrix(c.width, ffn_gate=c.ffn, ffn_up=c.ffn)
        return Layer(
            attention_norm=block.vector("attn_norm.weight", c.width),
            attention=attention,
            attention_after=block.vector("post_attention_norm.weight", c.width),
            ffn_norm=block.vector("ffn_norm.weight", c.width),
            ffn=GatedFeedForward(gate_up, block.matrix(c.ffn, ffn_down=c.width), "gelu_tanh"),
            ffn_after=block.vector("post_ffw_norm.weight", c.width),
            eps=c.eps,
        )

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return self._gemma.windows.layouts(self._config, kv_type, page_tokens)

    def identity(self) -> Mapping[str, str | int | float]:
        return identity_of(ARCHITECTURE, self._config, self._gemma, rope=self._far, rope_swa=self._near)


FAMILY = Family(ARCHITECTURE, (ARCHITECTURE,), Gemma3Model)
