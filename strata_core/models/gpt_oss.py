"""The ``gpt_oss`` family (OpenAI 2025): experts with a clamped gate, attention with learned sinks, biases everywhere.

Every other layer, the first included, attends a sliding window. The bounds of yarn's ramp are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strata_core.compute.base import AttentionSpec, Backend, ExpertSpec, Rotation, Router
from strata_core.experts import ExpertSource, ResidentExperts
from strata_core.models.base import Family, Geometry, ModelOptions
from strata_core.models.config import DecoderConfig, identity_of
from strata_core.models.keys import Keys
from strata_core.models.loading import Block, Ends
from strata_core.models.stack import GroupedAttention, Layer, MixtureFeedForward, StackModel
from strata_core.models.windows import Windows
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "gpt-oss"

_EXPERT = ExpertSpec("swiglu_oai", limit=7.0)


class GptOssModel(StackModel):
    """See the module's docstring. Two kinds of pages: full attention, sliding windows."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        c = self._config = DecoderConfig.read(keys, options, yarn_truncate=False)
        self._windows = Windows.read(keys, c.layers, period=2)
        self._experts, self._top = keys.size("expert_count"), keys.size("expert_used_count")
        if self._top > self._experts:
            raise keys.wrong("expert_used_count", f"the model has {self._experts} experts")
        expert_ffn = keys.size("expert_feed_forward_length")
        keys.refuse_others()
        self._backend, self._eps = backend, c.eps
        self._ends = Ends.load(source, backend, c.width)
        rotation = self._rotation = c.rope.rotation(interleaved=False)
        blocks = [Block(source, backend, number) for number in range(c.layers)]
        experts = ResidentExperts(backend, {b.number: b.experts(self._experts, expert_ffn, c.width) for b in blocks})
        self._layers = tuple(self._layer(block, rotation, experts) for block in blocks)
        self.geometry = Geometry(ARCHITECTURE, c.layers, c.width, self._ends.vocab, c.context)

    def _layer(self, block: Block, rotation: Rotation, experts: ExpertSource) -> Layer:
        c, number = self._config, block.number
        qkv, biases = block.qkv(c)
        attention = GroupedAttention(
            qkv=qkv,
            qkv_biases=biases,
            rotation=rotation,
            spec=AttentionSpec(
                c.heads, c.kv_heads, c.head_dim, c.value_dim, c.attention_scale, self._windows.of(number)
            ),
            cache=self._windows.cache(number),
            output=block.matrix(c.heads * c.value_dim, attn_output=c.width),
            output_bias=block.optional("attn_output.bias", c.width),
            eps=c.eps,
            sinks=block.vector("attn_sinks.weight", c.heads),
        )
        router = Router(
            block.matrix(c.width, ffn_gate_inp=self._experts),
            self._top,
            scoring="softmax_top",
            bias=block.optional("ffn_gate_inp.bias", self._experts),
        )
        return Layer(
            attention_norm=block.vector("attn_norm.weight", c.width),
            attention=attention,
            ffn_norm=block.vector("post_attention_norm.weight", c.width),
            ffn=MixtureFeedForward(number, router, experts, _EXPERT),
            eps=c.eps,
        )

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return self._windows.layouts(self._config, kv_type, page_tokens)

    def identity(self) -> Mapping[str, str | int | float]:
        identity = identity_of(ARCHITECTURE, self._config, self._windows, rope=self._rotation)
        return identity | {"experts": self._experts, "top": self._top}


FAMILY = Family("gpt_oss", (ARCHITECTURE,), GptOssModel)
