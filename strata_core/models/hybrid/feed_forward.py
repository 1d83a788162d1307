"""Feed-forward parts of hybrid models: dense, or a mixture of experts with one that every row goes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import Array, Backend, ExpertSpec, Router
from strata_core.experts import ExpertTensors, ResidentExperts
from strata_core.models.keys import Keys
from strata_core.models.loading import Block
from strata_core.models.stack import GatedFeedForward, MixtureFeedForward
from strata_core.weights.tensor import StoredTensor

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


@attrs.frozen
class MixtureSizes:
    """Shape of a mixture of experts with a shared one.

    :ivar scale: factor on the weights of the chosen experts; :ivar normalise: these are divided by their sum.
    """

    experts: int
    top: int
    expert_ffn: int
    shared_ffn: int
    scale: float
    normalise: bool

    @classmethod
    def read(cls, keys: Keys) -> MixtureSizes:
        """:raises ModelFileError: a key is missing or impossible."""
        experts, top = keys.size("expert_count"), keys.size("expert_used_count")
        if top > experts:
            raise keys.wrong("expert_used_count", f"the model has {experts} experts")
        return cls(
            experts=experts,
            top=top,
            expert_ffn=keys.size("expert_feed_forward_length"),
            shared_ffn=keys.size("expert_shared_feed_forward_length"),
            scale=keys.number("expert_weights_scale", 0.0) or 1.0,
            normalise=keys.flag("expert_weights_norm", True),
        )


@attrs.frozen(eq=False)
class SharedExpert:
    """An expert for every row, which a single projection of the row gates (Qwen2-MoE). :ivar gate: ``(1, width)``."""

    expert: GatedFeedForward
    gate: Array

    def apply(self, b: Backend, x: Array) -> Array:
        """``(rows, width)`` to ``(rows, width)``."""
        return b.multiply(self.expert.apply(b, x), b.activate(b.linear(x, self.gate), "sigmoid"))


def load_dense(block: Block, width: int, ffn: int, suffix: str = "") -> GatedFeedForward:
    """
    :param suffix: of the tensors' names, ``_shexp`` for a shared expert.
    :raises ModelFileError: a tensor is missing or of another shape.
    """
    gate_up = block.matrix(width, **{f"ffn_gate{suffix}": ffn, f"ffn_up{suffix}": ffn})
    return GatedFeedForward(gate_up, block.matrix(ffn, **{f"ffn_down{suffix}": width}))


def load_mixtures(
    source: WeightSource, backend: Backend, layers: Iterable[int], width: int, sizes: MixtureSizes
) -> tuple[MixtureFeedForward, ...]:
    """Those of the layers of these numbers. :raises ModelFileError: a tensor is missing or of another shape."""
    blocks = [Block(source, backend, number) for number in layers]
    experts = ResidentExperts(backend, {block.number: _tensors(block, width, sizes) for block in blocks})
    out = []
    for block in blocks:
        weight = block.matrix(width, ffn_gate_inp=sizes.experts)
        router = Router(weight, sizes.top, normalise=sizes.normalise, scale=sizes.scale)
        shared = SharedExpert(load_dense(block, width, sizes.shared_ffn, "_shexp"), _shared_gate(block, width))
        out.append(MixtureFeedForward(block.number, router, experts, ExpertSpec(), shared))
    return tuple(out)


def _tensors(block: Block, width: int, sizes: MixtureSizes) -> ExpertTensors:
    """A layer's experts, whose gate and up matrices are two tensors or one."""
    count, ffn = sizes.experts, sizes.expert_ffn
    if not block.has("ffn_gate_up_exps.weight"):
        return block.experts(count, ffn, width)
    both = block.tensor("ffn_gate_up_exps.weight", count, 2 * ffn, width)
    return ExpertTensors(both, None, block.tensor("ffn_down_exps.weight", count, width, ffn))


def _shared_gate(block: Block, width: int) -> Array:
    tensor = block.source.require(f"blk.{block.number}.ffn_gate_inp_shexp.weight")
    if tensor.shape != (width,):  # some writers leave out a dimension of 1
        tensor = block.tensor("ffn_gate_inp_shexp.weight", 1, width)
    return block.backend.matrix(StoredTensor(tensor.name, (1, width), tensor.type, tensor.data))
