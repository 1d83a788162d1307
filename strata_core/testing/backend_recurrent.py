"""Conformance of operations that carry a state from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import NO_STATE, Array, Backend, DeltaSpec, PageStore, Span
from strata_core.memory.arena import Arena
from strata_core.pool.layout import PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, begin, random_rows, stored

CHUNK, CHUNKS = 3, 4
CHANNELS, KERNEL, DILATIONS = 40, 4, (1, 3)
SPECS = {
    "grouped": DeltaSpec(key_heads=2, value_heads=6, key_dim=16, value_dim=8),
    "equal": DeltaSpec(key_heads=3, value_heads=3, key_dim=8, value_dim=8),
    "one-key": DeltaSpec(key_heads=1, value_heads=4, key_dim=24, value_dim=40),
}
#: How a sequence of 30 positions is cut into steps.
CUTS = {"at-once": [30], "one-by-one": [1] * 30, "odd": [2, 1, 11, 3, 13], "short-beginning": [1, 1, 28]}


class States:
    """A store of states of convolutions of each dilation and of one delta net; pages are poisoned and never reused."""

    def __init__(self, backend: Backend, arena: Arena, spec: DeltaSpec):
        self.backend = backend
        parts = [(f"conv.{d}", 1, (KERNEL - 1) * d * CHANNELS) for d in DILATIONS]
        self.layout = PageLayout.state([*parts, ("delta", spec.value_heads, spec.key_dim * spec.value_dim)])
        self.store: PageStore = backend.page_store(self.layout, CHUNK, arena)
        for chunk in range(CHUNKS):
            self.store.add_chunk(chunk)
        pages = list(range(CHUNK * CHUNKS))
        self.store.upload(np.full((len(pages), self.layout.nbytes), 0xFF, np.uint8), pages).wait()
        self._free = np.random.default_rng(5).permutation(pages).tolist()

    def page(self) -> int:
        """A page that holds nothing."""
        page: int = self._free.pop()
        return page

    def give_back(self, page: int) -> None:
        """Free a page; what is in it is not to be seen again."""
        self.store.upload(np.full((1, self.layout.nbytes), 0xFF, np.uint8), [page]).wait()
        self._free.insert(0, page)

    def begin(self, parts: Sequence[tuple[int, int, int, int]]) -> Array:
        """A step of spans ``(start, rows, page read, page written)``."""
        return begin(self.backend, [Span(a, n, (), (read, write)) for a, n, read, write in parts], [self.store])

    def content(self, page: int) -> NDArray[np.uint8]:
        """The page's bytes."""
        block = np.empty((1, self.layout.nbytes), np.uint8)
        self.store.download([page], block).wait()
        content: NDArray[np.uint8] = block[0]
        return content


class RecurrentTests(BackendKit):
    """Causal convolution and gated delta rule against their formulas."""

    @pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
    @pytest.mark.parametrize("dilation", DILATIONS)
    def test_causal_conv_over_steps(self, backend: Backend, arena: Arena, dilation: int, cuts: list[int]) -> None:
        states = States(backend, arena, SPECS["equal"])
        x, weight = random_rows(1, 30, CHANNELS), random_rows(2, CHANNELS, KERNEL)
        taken, number = backend.vector(stored(weight)), DILATIONS.index(dilation)
        start, page, found = 0, NO_STATE, []
        for rows in cuts:
            after = states.page()
            step = states.begin([(start, rows, page, after)])
            part = backend.from_host(x[start : start + rows])
            found.append(backend.to_host(backend.causal_conv(step, (0, number), part, taken, dilation)))
            if page != NO_STATE:
                states.give_back(page)
            start, page = start + rows, after
        self.close_to(np.concatenate(found), formulas.causal_conv(x, weight, dilation))

    @pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
    @pytest.mark.parametrize("name", SPECS)
    def test_gated_delta_over_steps(self, backend: Backend, arena: Arena, name: str, cuts: list[int]) -> None:
        spec = SPECS[name]
        states, inputs = States(backend, arena, spec), _inputs(spec, 30, seed=1)
        start, page, found = 0, NO_STATE, []
        for rows in cuts:
            after = states.page()
            step = states.begin([(start, rows, page, after)])
            found.append(_delta(backend, step, [x[start : start + rows] for x in inputs], spec))
            if page != NO_STATE:
                states.give_back(page)
            start, page = start + rows, after
        expected, last = formulas.gated_delta(*inputs)
        self.close_to(np.concatenate(found), expected)
        part = states.layout.layers[len(DILATIONS)][0]
        kept = states.content(page)[part.offset : part.offset + part.nbytes(1)].view(np.float32)
        self.close_to(kept.reshape(last.shape), last)

    def test_sequences_of_one_step_that_begin_branch_and_go_on(self, backend: Backend, arena: Arena) -> None:
        spec = SPECS["grouped"]
        states, common, one, other = States(backend, arena, spec), *(_inputs(spec, 9, seed) for seed in (1, 11, 21))
        root, first, second, third = (states.page() for _ in range(4))
        _delta(backend, states.begin([(0, 9, NO_STATE, root)]), common, spec)
        kept = states.content(root)
        step = states.begin([(9, 4, root, first), (0, 1, NO_STATE, second), (9, 9, root, third)])
        rows = [np.concatenate([a[:4], b[:1], c]) for a, b, c in zip(one, one, other, strict=True)]
        found = _delta(backend, step, rows, spec)
        for own, begun in ((one, found[:4]), (other, found[5:])):
            whole = [np.concatenate([a, b[: len(begun)]]) for a, b in zip(common, own, strict=True)]
            self.close_to(begun, formulas.gated_delta(*whole)[0][9:])
        self.close_to(found[4:5], formulas.gated_delta(*(x[:1] for x in one))[0])
        assert np.array_equal(states.content(root), kept)  # a step never changes the state that it reads


def _inputs(spec: DeltaSpec, rows: int, seed: int) -> list[NDArray[np.float32]]:
    q, k = (random_rows(seed + i, rows, spec.key_heads, spec.key_dim) / np.float32(4) for i in (0, 1))
    v = random_rows(seed + 2, rows, spec.value_heads, spec.value_dim)
    decay = -np.abs(random_rows(seed + 3, rows, spec.value_heads))
    beta = np.random.default_rng(seed + 4).uniform(0, 1, (rows, spec.value_heads)).astype(np.float32)
    return [q, k, v, decay, beta]


def _delta(
    backend: Backend, step: Array, inputs: Sequence[NDArray[np.float32]], spec: DeltaSpec
) -> NDArray[np.float32]:
    q, k, v, decay, beta = (backend.from_host(x.reshape(len(x), -1)) for x in inputs)
    return backend.to_host(backend.gated_delta(step, (0, len(DILATIONS)), q, k, v, decay, beta, spec))
