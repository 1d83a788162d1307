"""Conformance of mixtures of experts."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend, ExpertSpec, Router
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, random_rows, stored

EXPERTS, WIDTH, FFN = 12, 64, 32

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"top": 3},
    "softmax-as-it-is": {"top": 3, "normalise": False},
    "all": {"top": EXPERTS},
    "one": {"top": 1, "scoring": "sigmoid", "normalise": False},
    "sigmoid": {"top": 4, "scoring": "sigmoid", "scale": 2.5},
    "the-best-only": {"top": 4, "scoring": "softmax_top"},
    "groups": {"top": 4, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 1.5},
}


@attrs.frozen(eq=False)
class FakeExperts:
    """Weights of a layer's experts as plain numbers."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]
    gate_up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None

    @classmethod
    def random(cls, *, biased: bool = False) -> FakeExperts:
        gate, up = (random_rows(seed, EXPERTS, FFN, WIDTH) / np.float32(8) for seed in (1, 2))
        down = random_rows(3, EXPERTS, WIDTH, FFN) / np.float32(8)
        if not biased:
            return cls(gate, up, down)
        return cls(gate, up, down, random_rows(4, EXPERTS, 2 * FFN), random_rows(5, EXPERTS, WIDTH))

    def expected(self, x: NDArray[np.float32], weights: NDArray[Any], spec: ExpertSpec) -> NDArray[np.float64]:
        """:param weights: ``(rows, experts)``."""
        out = np.zeros(x.shape)
        for row, number in zip(*np.nonzero(weights), strict=True):
            wide = x[row].astype(np.float64)
            gate, up = self.gate[number] @ wide, self.up[number] @ wide
            if self.gate_up_bias is not None:
                gate, up = gate + self.gate_up_bias[number, :FFN], up + self.gate_up_bias[number, FFN:]
            result = self.down[number] @ formulas.expert(gate, up, spec)
            if self.down_bias is not None:
                result = result + self.down_bias[number]
            out[row] += weights[row, number] * result
        return out


def chosen(rows: int, top: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and weights such as routing gives, with experts that many rows share and some that none chooses."""
    random = np.random.default_rng(rows)
    ids = np.array([random.permutation(EXPERTS - 3)[:top] for _ in range(rows)], np.int32)
    return ids, random.uniform(0.1, 1, (rows, top)).astype(np.float32)


def spread(ids: NDArray[np.int32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """``(rows, experts)``: each row's weights at the places of its experts."""
    out = np.zeros((len(ids), EXPERTS), np.float32)
    np.put_along_axis(out, ids.astype(np.int64), weights, axis=1)
    return out


class MixtureTests(BackendKit):
    """Choosing experts, and computing with them."""

    @pytest.mark.parametrize("rows", [1, 17])
    @pytest.mark.parametrize("corrected", [False, True])
    @pytest.mark.parametrize("name", ROUTERS)
    def test_route_chooses_and_weighs_experts(self, backend: Backend, name: str, corrected: bool, rows: int) -> None:
        x, bias = random_rows(1, rows, WIDTH), random_rows(3, EXPERTS)
        weight = random_rows(2, EXPERTS, WIDTH) / np.float32(8)
        only_for = ROUTERS[name].get("scoring") == "sigmoid"
        correction = np.abs(random_rows(4, EXPERTS)) if corrected and only_for else None
        router = Router(
            weight=backend.matrix(stored(weight)),
            bias=backend.vector(stored(bias)),
            correction=None if correction is None else backend.vector(stored(correction)),
            **ROUTERS[name],
        )
        ids, weights = backend.route(backend.from_host(x), router)
        assert ids.dtype == np.int32 and ids.shape == weights.shape == (rows, router.top)
        expected = formulas.route(x.astype(np.float64) @ weight.T + bias, router, correction)
        assert np.array_equal(spread(ids, weights) > 0, expected > 0)
        self.close_to(spread(ids, weights), expected)

    def test_of_equal_scores_the_lower_id_is_chosen(self, backend: Backend) -> None:
        weight = np.zeros((EXPERTS, WIDTH), np.float32)
        weight[[5, 9]] = 1
        router = Router(weight=backend.matrix(stored(weight)), top=4)
        ids, _ = backend.route(backend.from_host(np.ones((2, WIDTH), np.float32)), router)
        assert sorted(ids[0].tolist()) == sorted(ids[1].tolist()) == [0, 1, 5, 9]

    @pytest.mark.parametrize("rows", [1, 3, 40])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
    def test_mixture_sums_the_chosen_experts(self, backend: Backend, activation: str, rows: int) -> None:
        spec = ExpertSpec(activation, limit=1.5)
        for fake in (FakeExperts.random(), FakeExperts.random(biased=True)):
            biases = (fake.gate_up_bias, fake.down_bias)
            vectors = [None if bias is None else stored(bias) for bias in biases]
            experts = backend.experts(stored(fake.gate), stored(fake.up), stored(fake.down), *vectors)
            x, (ids, weights) = random_rows(7, rows, WIDTH), chosen(rows, 4)
            out = backend.mixture(backend.from_host(x), ids, weights, experts, spec)
            self.close_to(backend.to_host(out), fake.expected(x, spread(ids, weights), spec))

    def test_gate_and_up_may_come_as_one_tensor(self, backend: Backend) -> None:
        fake, x, (ids, weights) = FakeExperts.random(), random_rows(7, 5, WIDTH), chosen(5, 2)
        both = np.concatenate([fake.gate, fake.up], axis=1)
        experts = backend.experts(stored(both), None, stored(fake.down))
        out = backend.mixture(backend.from_host(x), ids, weights, experts, ExpertSpec())
        self.close_to(backend.to_host(out), fake.expected(x, spread(ids, weights), ExpertSpec()))

    @pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "MXFP4"])
    def test_quantised_experts_are_used_as_they_dequantise(self, backend: Backend, kind: str) -> None:
        fake = FakeExperts.random()
        tensors = [stored(array, kind) for array in (fake.gate, fake.up, fake.down)]
        fake = FakeExperts(*(tensor.dequantise() for tensor in tensors))
        x, (ids, weights) = random_rows(7, 9, WIDTH), chosen(9, 3)
        out = backend.mixture(backend.from_host(x), ids, weights, backend.experts(*tensors), ExpertSpec())
        self.close_to(backend.to_host(out), fake.expected(x, spread(ids, weights), ExpertSpec()))

    def test_the_order_in_which_experts_are_named_means_nothing(self, backend: Backend) -> None:
        fake, x, (ids, weights) = FakeExperts.random(), random_rows(7, 6, WIDTH), chosen(6, 4)
        experts = backend.experts(*(stored(array) for array in (fake.gate, fake.up, fake.down)))
        outs = [
            backend.to_host(backend.mixture(backend.from_host(x), i, w, experts, ExpertSpec()))
            for i, w in ((ids, weights), (ids[:, ::-1].copy(), weights[:, ::-1].copy()))
        ]
        self.close_to(outs[0], outs[1].astype(np.float64))
