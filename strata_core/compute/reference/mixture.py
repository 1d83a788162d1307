"""Mixture of experts in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from strata_core.compute.base import Array, Backend, ExpertSpec, Router
from strata_core.compute.reference.kv import Floats

if TYPE_CHECKING:
    from strata_core.weights.tensor import StoredTensor


@attrs.frozen(eq=False)
class ExpertWeights:
    """The experts of one layer.

    :ivar gate_up: for each expert its gate and up matrices, stacked; :ivar down: its down matrix.
    :ivar gate_up_bias: vectors ``(experts, 2 * ffn)``, or None; :ivar down_bias: ``(experts, width)``, or None.
    """

    gate_up: list[Array]
    down: list[Array]
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


class HostMixture(Backend):
    """Experts as lists of the backend's own matrices; each is multiplied with the rows that chose it, all at once."""

    def experts(
        self,
        gate: StoredTensor,
        up: StoredTensor | None,
        down: StoredTensor,
        gate_up_bias: StoredTensor | None = None,
        down_bias: StoredTensor | None = None,
    ) -> ExpertWeights:
        count = gate.shape[0]
        both = [[gate.inner(n)] if up is None else [gate.inner(n), up.inner(n)] for n in range(count)]
        return ExpertWeights(
            gate_up=[self.matrix(*parts) for parts in both],
            down=[self.matrix(down.inner(n)) for n in range(count)],
            gate_up_bias=None if gate_up_bias is None else self.vector(gate_up_bias),
            down_bias=None if down_bias is None else self.vector(down_bias),
        )

    def route(self, x: Floats, router: Router) -> tuple[np.ndarray, np.ndarray]:
        return choose_experts(self.to_host(self.linear(x, router.weight, router.bias)), router)

    def mixture(
        self, x: Floats, ids: np.ndarray, weights: np.ndarray, experts: ExpertWeights, spec: ExpertSpec
    ) -> Floats:
        out = np.zeros_like(x)
        if len(x) == 1:  # nothing to gather; experts in the same order as below, so that a row has the same bits
            for place in np.argsort(ids[0]).tolist():
                out += self._expert(x, int(ids[0, place]), experts, spec) * weights[0, place]
            return out
        order = np.argsort(ids, axis=None, kind="stable")
        used, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        for expert, places in zip(used.tolist(), np.split(order, starts[1:]), strict=True):
            rows = places // ids.shape[1]
            y = self._expert(x[rows], expert, experts, spec)
            # A row chooses an expert once, so no row is named twice here.
            out[rows] += y * weights.reshape(-1)[places, None]
        return out

    def _expert(self, x: Floats, number: int, experts: ExpertWeights, spec: ExpertSpec) -> Floats:
        def bias(vectors: Any) -> Any:
            return None if vectors is None else vectors[number]

        both = self.linear(x, experts.gate_up[number], bias(experts.gate_up_bias))
        ffn = both.shape[1] // 2
        gate, up = np.ascontiguousarray(both[:, :ffn]), both[:, ffn:]
        if spec.activation == "swiglu_oai":
            inner = clamped_swiglu(gate, up, spec.limit)
        else:
            inner = self.gated(gate, up, spec.activation)
        return self.linear(inner, experts.down[number], bias(experts.down_bias))  # type: ignore[no-any-return]


def clamped_swiglu(gate: Floats, up: Floats, limit: float) -> Floats:
    """gpt-oss: ``gate * sigmoid(1.702 * gate) * (up + 1)`` of ``gate <= limit`` and ``-limit <= up <= limit``."""
    gate = np.minimum(gate, np.float32(limit))
    up = np.clip(up, np.float32(-limit), np.float32(limit))
    sigmoid = np.float32(0.5) * (np.tanh(np.float32(0.5 * 1.702) * gate) + np.float32(1))
    out: Floats = gate * sigmoid * (up + np.float32(1))
    return out


def choose_experts(logits: np.ndarray, router: Router) -> tuple[np.ndarray, np.ndarray]:
    """See :meth:`strata_core.compute.base.Backend.route`. Pure.

    :param logits: float32 ``(rows, experts)``.
    """
    if router.scoring == "sigmoid":
        scores = np.float32(0.5) * (np.tanh(np.float32(0.5) * logits) + np.float32(1))
    elif router.scoring == "softmax":
        scores = _softmax(logits)
    else:
        scores = logits
    ranked = scores if router.correction is None else scores + np.asarray(router.correction)
    if router.groups > 1:
        ranked = _within_groups(ranked, router)
    # A stable sort of the negated scores: among equals the lower id comes first.
    ids = np.argsort(-ranked, axis=1, kind="stable")[:, : router.top].astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=1)
    if router.scoring == "softmax_top":
        weights = _softmax(weights)
    elif router.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return ids, np.ascontiguousarray(weights * np.float32(router.scale), np.float32)


def _within_groups(ranked: np.ndarray, router: Router) -> np.ndarray:
    """Scores, with those of experts in groups that do not take part at minus infinity."""
    rows = len(ranked)
    grouped = ranked.reshape(rows, router.groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.argsort(-best, axis=1, kind="stable")[:, : router.top_groups]
    out = np.full_like(grouped, -np.inf)
    np.put_along_axis(out, chosen[:, :, None], np.take_along_axis(grouped, chosen[:, :, None], axis=1), axis=1)
    return out.reshape(rows, -1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    out: np.ndarray = e / e.sum(axis=1, keepdims=True)
    return out
