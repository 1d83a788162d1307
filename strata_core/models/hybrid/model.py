"""Pre-norm decoders of gated delta nets and gated attention: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from strata_core.compute.base import Array, Backend, Batch
from strata_core.models.base import Geometry
from strata_core.models.hybrid.delta_net import DeltaNet
from strata_core.models.hybrid.gated_attention import GatedAttention
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.hybrid.vocabulary import load_vocabulary
from strata_core.models.layered import LayeredModel
from strata_core.models.loading import Block
from strata_core.models.mtp import Entrance, FurtherLayer, PlainPredictor, embedding_of, output_of
from strata_core.models.stack import FeedForward
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

#: Number of the store of states: behind that of the one layout of pages.
STATES = 1


@attrs.frozen(eq=False)
class HybridLayer:
    """A mixer of rows and a feed-forward part, each of normed input and added to it."""

    mixer_norm: Array
    mixer: DeltaNet | GatedAttention
    ffn_norm: Array
    ffn: FeedForward


class HybridModel(LayeredModel):
    """See the module's docstring.

    :param tiled: order of the value heads; see :mod:`strata_core.models.hybrid.delta_net`.
    :param feed_forwards: that part of every layer; last comes that of the one that predicts further tokens, where the
        sizes say that it is used.
    :param facts: what changes states and K/V beside the sizes.
    """

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        architecture: str,
        sizes: HybridSizes,
        *,
        tiled: bool,
        feed_forwards: Sequence[FeedForward],
        facts: Mapping[str, str | int | float],
    ):
        s = self._sizes = sizes
        self._backend = backend
        self._facts = facts
        vocabulary = self._vocabulary = load_vocabulary(source, backend, s.width)
        rotation = self._rotation = s.decoder.rope.rotation(interleaved=False)
        layers = []
        state = 0
        for number in range(s.decoder.layers):
            block = Block(source, backend, number)
            mixer: DeltaNet | GatedAttention
            if s.attends(number):
                mixer = GatedAttention.load(source, backend, s, number, rotation)
            else:
                mixer = DeltaNet.load(source, backend, s, number, (STATES, state), tiled=tiled)
                state += 2
            layers.append(
                HybridLayer(
                    block.vector("attn_norm.weight", s.width),
                    mixer,
                    block.vector("post_attention_norm.weight", s.width),
                    feed_forwards[number],
                )
            )
        self._layers = tuple(layers)
        self._norm = backend.vector(source.require("output_norm.weight", (s.width,)))
        if s.further:
            self.further = self._load_further(Block(source, backend, s.decoder.layers), feed_forwards[-1])
        self.geometry = Geometry(architecture, s.decoder.layers, s.width, vocabulary.size, s.decoder.context)

    def _load_further(self, block: Block, ffn: FeedForward) -> FurtherLayer:
        s, b = self._sizes, self._backend
        eps, norm = s.decoder.eps, "nextn.shared_head_norm.weight"
        predictor = PlainPredictor(
            entrance=Entrance.load(block, s.width, eps),
            attention_norm=block.vector("attn_norm.weight", s.width),
            mixer=GatedAttention.load(block.source, b, s, block.number, self._rotation, stores=True),
            ffn_norm=block.vector("post_attention_norm.weight", s.width),
            ffn=ffn,
            norm=block.vector(norm, s.width) if block.has(norm) else self._norm,
            output=output_of(block, self._vocabulary.output),
            eps=eps,
        )
        embedding = embedding_of(block, self._vocabulary.embedding)
        return FurtherLayer(self, b, predictor, lambda step: b.embed(step, embedding), s.width)

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return (self._sizes.layout(kv_type, page_tokens),)

    def state_layout(self) -> PageLayout:
        return PageLayout.state(self._sizes.states())

    def identity(self) -> Mapping[str, str | int | float]:
        return {**self._sizes.identity(self.geometry.architecture, self._rotation), **self._facts}

    def embed(self, step: Any) -> Array:
        return self._backend.embed(step, self._vocabulary.embedding)

    def hidden(self, step: Any, batch: Batch, every: bool) -> Array | None:
        b, eps = self._backend, self._sizes.decoder.eps
        x = self.embed(step)
        for layer in self._layers:
            x = b.add(x, layer.mixer.forward(step, b.rms_norm(x, layer.mixer_norm, eps)))
            if layer is self._layers[-1] and not every:  # all K/V and states are written; now only wanted rows matter
                if not len(batch.outputs):
                    return None
                x = b.select_outputs(step, x)
            x = b.add(x, layer.ffn.apply(b, b.rms_norm(x, layer.ffn_norm, eps)))
        return b.rms_norm(x, self._norm, eps)

    def logits(self, hidden: Array) -> Array:
        return self._backend.linear(hidden, self._vocabulary.output)
