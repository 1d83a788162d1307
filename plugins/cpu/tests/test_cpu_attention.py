"""Attention: bits that do not depend on how a prompt is cut, at the edges of pages and blocks of positions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cpu_kit import make
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Backend, Batch, Span
from strata_core.errors import BackendError
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import random_rows, stored

SPECS = {
    "grouped": AttentionSpec(heads=6, kv_heads=2, head_dim=64, value_dim=64, scale=0.125),
    "odd widths": AttentionSpec(heads=3, kv_heads=1, head_dim=20, value_dim=36, scale=0.2),
    "window": AttentionSpec(heads=4, kv_heads=2, head_dim=32, value_dim=32, scale=0.2, window=300),
    "softcap": AttentionSpec(heads=2, kv_heads=2, head_dim=16, value_dim=16, scale=1.0, softcap=5.0),
    "sinks": AttentionSpec(heads=6, kv_heads=2, head_dim=64, value_dim=64, scale=0.125),
    "sinks, window": AttentionSpec(heads=4, kv_heads=2, head_dim=32, value_dim=20, scale=0.2, window=270, softcap=3.0),
}
#: Of each head: no share of the softmax, some, most, all, and such that exponentials are infinite.
SINKS = np.array([-200, 3, 7, 30, 500, -1], np.float32)
LENGTH = 600  # more than two blocks of 256 positions


class Sequence:
    """One layer's K/V of one sequence, read in whatever pieces."""

    def __init__(self, backend: Backend, name: str, kv_type: str):
        self.backend, self.spec = backend, SPECS[name]
        spec = self.spec
        self.sinks = SINKS[: spec.heads] if name.startswith("sinks") else None
        self._sinks = None if self.sinks is None else backend.vector(stored(self.sinks))
        layout = PageLayout.attention(
            layers=1, kv_heads=spec.kv_heads, head_dim=spec.head_dim, value_dim=spec.value_dim,
            kv_type=kv_type, page_tokens=32,
        )  # fmt: skip
        self.store = backend.page_store(layout, 7, PortableArena("off"))
        for chunk in range(3):
            self.store.add_chunk(chunk)
        self.table = np.random.default_rng(1).permutation(21).astype(np.int32)
        sizes = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim)
        self.q, self.k, self.v = (random_rows(i, LENGTH, size) for i, size in enumerate(sizes))

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        span = Span(start, stop - start, (self.table,))
        step = self.backend.begin(Batch(np.zeros(stop - start, np.int32), (span,), np.zeros(0, np.int32)), [self.store])
        q, k, v = (self.backend.from_host(x[start:stop]) for x in (self.q, self.k, self.v))
        return self.backend.to_host(self.backend.attention(step, (0, 0), q, k, v, self.spec, self._sinks))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_row_has_the_same_bits_however_its_sequence_is_read(isa: str, spec: str, kv_type: str) -> None:
    whole = Sequence(make(2, isa), spec, kv_type).read(0, LENGTH)
    for threads, edges in ((1, [0, 200, 201, 260, LENGTH]), (3, [0, 31, 32, 255, 256, 257, 598, 599, LENGTH])):
        sequence = Sequence(make(threads, isa), spec, kv_type)
        pieces = [sequence.read(a, b) for a, b in itertools.pairwise(edges)]
        assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_long_sequences_against_the_formula(isa: str, spec: str) -> None:
    s = SPECS[spec]
    sequence = Sequence(make(2, isa), spec, "f32")
    k = sequence.k.reshape(LENGTH, s.kv_heads, s.head_dim)
    v = sequence.v.reshape(LENGTH, s.kv_heads, s.value_dim)
    expected = formulas.attention(sequence.q.reshape(LENGTH, s.heads, s.head_dim), k, v, 0, s, sequence.sinks).reshape(LENGTH, -1)
    assert np.abs(sequence.read(0, LENGTH) - expected).max() < 2e-5
    for threads in (1, 3):  # with several threads, blocks of positions are tasks of their own
        sequence = Sequence(make(threads, isa), spec, "f32")
        sequence.read(0, 590)
        assert np.abs(sequence.read(590, 591) - expected[590]).max() < 2e-5


def test_a_table_that_names_absent_pages_is_refused_before_anything_is_read() -> None:
    sequence = Sequence(make(), "grouped", "f16")
    for wrong in (21, -1, 1 << 30):
        sequence.table[0] = wrong
        with pytest.raises(BackendError, match="not there"):
            sequence.read(0, 40)
    sequence.table = np.arange(2, dtype=np.int32)
    with pytest.raises(BackendError, match="does not cover"):
        sequence.read(0, 65)
