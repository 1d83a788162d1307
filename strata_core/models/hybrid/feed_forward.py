"""Feed-forward parts of hybrid models: dense, or a mixture of experts with one that every row goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from strata_core.compute.base import Array, Backend, ExpertSpec, Router
from strata_core.models.keys import Keys
from strata_core.weights.tensor import StoredTensor

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


class FeedForward(Protocol):
    """The part of a layer that looks at single rows."""

    def forward(self, x: Array) -> Array:
        """``(rows, width)`` to ``(rows, width)``."""


@attrs.frozen(eq=False)
class DenseFeedForward:
    """A gated MLP with SiLU. :ivar gate_up: the two matrices, stacked in this order."""

    backend: Backend
    gate_up: Array
    down: Array

    @classmethod
    def load(
        cls, source: WeightSource, backend: Backend, prefix: str, suffix: str, width: int, ffn: int
    ) -> DenseFeedForward:
        """:param suffix: of the tensors' names, ``_shexp`` for a shared expert."""
        gate, up = (source.require(f"{prefix}ffn_{part}{suffix}.weight", (ffn, width)) for part in ("gate", "up"))
        down = source.require(f"{prefix}ffn_down{suffix}.weight", (width, ffn))
        return cls(backend, backend.matrix(gate, up), backend.matrix(down))

    def forward(self, x: Array) -> Array:
        return self.backend.gated_mlp(x, self.gate_up, self.down, "silu")


@attrs.frozen
class MixtureSizes:
    """Shape of a mixture of experts with a shared one.

    :ivar scale: factor on the weights of the chosen experts; :ivar normalise: these are divided by their sum.
    """

    experts: int
    top: int
    ffn: int
    shared_ffn: int
    scale: float
    normalise: bool

    @classmethod
    def read(cls, keys: Keys) -> MixtureSizes:
        """:raises ModelFileError: a key is missing or impossible."""
        experts, top = keys.size("expert_count"), keys.size("expert_used_count")
        if top > experts:
            raise keys.wrong("expert_used_count", f"there are only {experts} experts")
        return cls(
            experts=experts,
            top=top,
            ffn=keys.size("expert_feed_forward_length"),
            shared_ffn=keys.size("expert_shared_feed_forward_length"),
            scale=keys.number("expert_weights_scale", 0.0) or 1.0,
            normalise=keys.flag("expert_weights_norm", True),
        )


@attrs.frozen(eq=False)
class SharedExpertMixture:
    """Chosen experts, and one for every row that is gated by a single projection (Qwen2-MoE).

    :ivar shared_gate: matrix ``(1, width)``.
    """

    backend: Backend
    router: Router
    experts: Array
    shared: DenseFeedForward
    shared_gate: Array

    @classmethod
    def load(
        cls, source: WeightSource, backend: Backend, prefix: str, width: int, sizes: MixtureSizes
    ) -> SharedExpertMixture:
        """:raises ModelFileError: a tensor is missing or has another shape."""
        s = sizes
        gate = source.require(prefix + "ffn_gate_inp_shexp.weight")
        if gate.shape != (1, width):  # a dimension of 1 is left out by some writers
            source.require(gate.name, (width,))
            gate = StoredTensor(gate.name, (1, width), gate.type, gate.data)
        return cls(
            backend=backend,
            router=Router(
                weight=backend.matrix(source.require(prefix + "ffn_gate_inp.weight", (s.experts, width))),
                top=s.top,
                normalise=s.normalise,
                scale=s.scale,
            ),
            experts=_take_experts(source, backend, prefix, width, s),
            shared=DenseFeedForward.load(source, backend, prefix, "_shexp", width, s.shared_ffn),
            shared_gate=backend.matrix(gate),
        )

    def forward(self, x: Array) -> Array:
        b = self.backend
        ids, weights = b.route(x, self.router)
        mixed = b.mixture(x, ids, weights, self.experts, ExpertSpec())
        gate = b.activate(b.linear(x, self.shared_gate), "sigmoid")
        return b.add(mixed, b.multiply(self.shared.forward(x), gate))


def _take_experts(source: WeightSource, backend: Backend, prefix: str, width: int, s: MixtureSizes) -> Array:
    """A layer's experts, whose gate and up matrices are one tensor or two."""
    down = source.require(prefix + "ffn_down_exps.weight", (s.experts, width, s.ffn))
    if source.get(prefix + "ffn_gate_up_exps.weight") is not None:
        both = source.require(prefix + "ffn_gate_up_exps.weight", (s.experts, 2 * s.ffn, width))
        return backend.experts(both, None, down)
    gate, up = (source.require(f"{prefix}ffn_{part}_exps.weight", (s.experts, s.ffn, width)) for part in ("gate", "up"))
    return backend.experts(gate, up, down)
