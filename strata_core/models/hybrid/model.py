"""Pre-norm decoders of gated delta nets and gated attention: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from strata_core.compute.base import Array, Backend, Batch, PageStore
from strata_core.models.base import Geometry, Model
from strata_core.models.hybrid.delta_net import DeltaNet
from strata_core.models.hybrid.gated_attention import GatedAttention
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.hybrid.vocabulary import load_vocabulary
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


class HybridModel(Model):
    """See the module's docstring.

    :param tiled: order of the value heads; see :mod:`strata_core.models.hybrid.delta_net`.
    :param feed_forwards: that part of every layer.
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
        vocabulary = load_vocabulary(source, backend, s.width)
        self._embedding, self._output = vocabulary.embedding, vocabulary.output
        rotation = self._rotation = s.decoder.rope.rotation(interleaved=False)

        def norm(name: str) -> Array:
            return backend.vector(source.require(f"{name}.weight", (s.width,)))

        layers = []
        state = 0
        for number in range(s.decoder.layers):
            prefix = f"blk.{number}."
            mixer: DeltaNet | GatedAttention
            if s.attends(number):
                mixer = GatedAttention.load(source, backend, s, number, rotation)
            else:
                mixer = DeltaNet.load(source, backend, s, number, (STATES, state), tiled=tiled)
                state += 2
            layers.append(
                HybridLayer(
                    norm(prefix + "attn_norm"),
                    mixer,
                    norm(prefix + "post_attention_norm"),
                    feed_forwards[number],
                )
            )
        self._layers = tuple(layers)
        self._norm = norm("output_norm")
        self.geometry = Geometry(architecture, s.decoder.layers, s.width, vocabulary.size, s.decoder.context)

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return (self._sizes.layout(kv_type, page_tokens),)

    def state_layout(self) -> PageLayout:
        return PageLayout.state(self._sizes.states())

    def identity(self) -> Mapping[str, str | int | float]:
        return {**self._sizes.identity(self.geometry.architecture, self._rotation), **self._facts}

    def forward(self, batch: Batch, stores: Sequence[PageStore]) -> np.ndarray:
        b, eps = self._backend, self._sizes.decoder.eps
        step = b.begin(batch, stores)
        x = b.embed(step, self._embedding)
        for layer in self._layers:
            x = b.add(x, layer.mixer.forward(step, b.rms_norm(x, layer.mixer_norm, eps)))
            if layer is self._layers[-1]:  # all K/V and states are written; from here on only wanted rows matter
                if not len(batch.outputs):
                    return np.empty((0, self.geometry.vocab), np.float32)
                x = b.select_outputs(step, x)
            x = b.add(x, layer.ffn.apply(b, b.rms_norm(x, layer.ffn_norm, eps)))
        return b.to_host(b.linear(b.rms_norm(x, self._norm, eps), self._output))
