"""The ``qwen3_moe`` family: Qwen 3 with experts in place of the gated MLP (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import AttentionSpec, Backend, ExpertSpec, Rotation, Router
from strata_core.experts import ExpertSource, ResidentExperts
from strata_core.models.base import Family, Geometry, ModelOptions
from strata_core.models.config import DecoderConfig, identity_of
from strata_core.models.keys import Keys
from strata_core.models.loading import Block, Ends
from strata_core.models.stack import GroupedAttention, Layer, MixtureFeedForward, StackModel
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen3moe"


@attrs.frozen
class MixtureConfig:
    """:ivar normalise: the weights of a row's experts are divided by their sum."""

    experts: int
    top: int
    expert_ffn: int
    normalise: bool

    @classmethod
    def read(cls, keys: Keys) -> MixtureConfig:
        """:raises ModelFileError: a key is missing or impossible."""
        experts, top = keys.size("expert_count"), keys.size("expert_used_count")
        if top > experts:
            raise keys.wrong("expert_used_count", f"the model has {experts} experts")
        ffn = keys.size("expert_feed_forward_length")
        return cls(experts, top, ffn, keys.flag("expert_weights_norm", True))


class Qwen3MoeModel(StackModel):
    """See the module's docstring. One kind of pages: full attention."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        c = self._config = DecoderConfig.read(keys, options)
        m = self._mixture = MixtureConfig.read(keys)
        keys.refuse_others()
        self._backend, self._eps = backend, c.eps
        self._ends = Ends.load(source, backend, c.width)
        rotation = self._rotation = c.rope.rotation(interleaved=False)
        blocks = [Block(source, backend, number) for number in range(c.layers)]
        experts = ResidentExperts(backend, {b.number: b.experts(m.experts, m.expert_ffn, c.width) for b in blocks})
        self._layers = tuple(self._layer(block, rotation, experts) for block in blocks)
        self.geometry = Geometry(ARCHITECTURE, c.layers, c.width, self._ends.vocab, c.context)

    def _layer(self, block: Block, rotation: Rotation, experts: ExpertSource) -> Layer:
        c, m = self._config, self._mixture
        qkv, biases = block.qkv(c)
        attention = GroupedAttention(
            qkv=qkv,
            qkv_biases=biases,
            q_norm=block.vector("attn_q_norm.weight", c.head_dim),
            k_norm=block.vector("attn_k_norm.weight", c.head_dim),
            rotation=rotation,
            spec=AttentionSpec(c.heads, c.kv_heads, c.head_dim, c.value_dim, c.attention_scale),
            cache=(0, block.number),
            output=block.matrix(c.heads * c.value_dim, attn_output=c.width),
            output_bias=block.optional("attn_output.bias", c.width),
            eps=c.eps,
        )
        router = Router(block.matrix(c.width, ffn_gate_inp=m.experts), m.top, normalise=m.normalise)
        return Layer(
            attention_norm=block.vector("attn_norm.weight", c.width),
            attention=attention,
            ffn_norm=block.vector("ffn_norm.weight", c.width),
            ffn=MixtureFeedForward(block.number, router, experts, ExpertSpec()),
            eps=c.eps,
        )

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return (self._config.layout(self._config.layers, kv_type, page_tokens),)

    def identity(self) -> Mapping[str, str | int | float]:
        return identity_of(ARCHITECTURE, self._config, self._mixture, rope=self._rotation)


FAMILY = Family("qwen3_moe", (ARCHITECTURE,), Qwen3MoeModel)
