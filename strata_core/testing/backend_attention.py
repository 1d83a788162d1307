"""Conformance of paged attention."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Backend, PageStore, Span
from strata_core.memory.arena import Arena
from strata_core.pool.layout import PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, begin, random_rows, stored

PAGE, CHUNK, CHUNKS, LAYERS = 8, 5, 4, 2

SPECS = {
    "grouped": AttentionSpec(heads=6, kv_heads=2, head_dim=16, value_dim=16, scale=0.25),
    "multi-head": AttentionSpec(heads=3, kv_heads=3, head_dim=16, value_dim=16, scale=0.25),
    "one-kv-head": AttentionSpec(heads=4, kv_heads=1, head_dim=8, value_dim=8, scale=0.5),
    "narrow-values": AttentionSpec(heads=4, kv_heads=2, head_dim=24, value_dim=8, scale=0.2),
    "window": AttentionSpec(heads=4, kv_heads=2, head_dim=16, value_dim=16, scale=0.25, window=11),
    "window-of-one": AttentionSpec(heads=2, kv_heads=2, head_dim=16, value_dim=16, scale=0.25, window=1),
    "softcap": AttentionSpec(heads=4, kv_heads=2, head_dim=16, value_dim=16, scale=2.0, softcap=3.0),
    "latent": AttentionSpec(heads=4, kv_heads=1, head_dim=24, value_dim=16, scale=0.2, latent=True),
    "latent-window": AttentionSpec(heads=4, kv_heads=2, head_dim=24, value_dim=16, scale=0.2, window=9, latent=True),
    "sinks": AttentionSpec(heads=6, kv_heads=2, head_dim=16, value_dim=16, scale=0.25),
    "sinks-window": AttentionSpec(heads=4, kv_heads=2, head_dim=16, value_dim=16, scale=0.25, window=11),
    "sinks-softcap": AttentionSpec(heads=4, kv_heads=4, head_dim=16, value_dim=16, scale=0.5, softcap=2.0),
}
#: Of each head: below all scores, among them, above them all.
SINKS = np.array([-30, 0.5, 3, 20, -1, 1], np.float32)


@attrs.define(eq=False)
class FakeSequence:
    """One sequence: its page table, and its q, k and v for every position and layer."""

    table: NDArray[np.int32]
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]


class Rig:
    """A page store with poisoned pages in several chunks, and sequences with scattered page tables."""

    def __init__(self, backend: Backend, arena: Arena, spec: AttentionSpec, kv_type: str, sinks: bool = False):
        self.backend, self.spec, self.kv_type = backend, spec, kv_type
        self.sinks = SINKS[: spec.heads] if sinks else None
        self._sinks = None if self.sinks is None else backend.vector(stored(self.sinks))
        self.layout = PageLayout.attention(
            layers=LAYERS,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            kv_type=kv_type,
            page_tokens=PAGE,
            latent=spec.latent,
        )
        self.store: PageStore = backend.page_store(self.layout, CHUNK, arena)
        for chunk in range(CHUNKS):
            self.store.add_chunk(chunk)
        pages = list(range(CHUNK * CHUNKS))
        # What was never written is NaN: it shows if any of it is used.
        self.store.upload(np.full((len(pages), self.layout.nbytes), 0xFF, np.uint8), pages).wait()
        self._free = np.random.default_rng(5).permutation(pages).tolist()

    def sequence(self, seed: int, length: int, shared: FakeSequence | None = None, prefix: int = 0) -> FakeSequence:
        """A new sequence of this length; its first ``prefix`` positions are those of ``shared``, in the same pages."""
        s, own = self.spec, []
        for _ in range(self.layout.pages_for(length) - prefix // PAGE):
            own.append(self._free.pop())
        made = FakeSequence(
            np.array(own, np.int32),
            random_rows(seed, LAYERS, length, s.heads, s.head_dim),
            random_rows(seed + 1, LAYERS, length, s.kv_heads, s.head_dim),
            random_rows(seed + 2, LAYERS, length, s.kv_heads, s.value_dim),
        )
        if shared is not None:
            made.table = np.concatenate([shared.table[: prefix // PAGE], made.table])
            made.k[:, :prefix], made.v[:, :prefix] = shared.k[:, :prefix], shared.v[:, :prefix]
        return made

    def attend(self, parts: Sequence[tuple[FakeSequence, int, int]], layer: int) -> list[NDArray[np.float32]]:
        """One step over rows ``start .. stop - 1`` of each sequence; the result of each."""
        spans = [Span(start, stop - start, (sequence.table,)) for sequence, start, stop in parts]
        step = begin(self.backend, spans, [self.store])

        def rows(name: str) -> NDArray[np.float32]:
            taken = [getattr(sequence, name)[layer, start:stop] for sequence, start, stop in parts]
            joined: NDArray[np.float32] = np.concatenate(taken)
            return joined.reshape(len(joined), -1)

        q, k = (self.backend.from_host(rows(name)) for name in "qk")
        v = None if self.spec.latent else self.backend.from_host(rows("v"))
        out = self.backend.to_host(self.backend.attention(step, (0, layer), q, k, v, self.spec, self._sinks))
        return np.split(out, np.cumsum([span.rows for span in spans])[:-1])

    def expected(self, sequence: FakeSequence, start: int, stop: int, layer: int) -> NDArray[np.float64]:
        k, v = (formulas.through(self.kv_type, rows[layer, :stop]) for rows in (sequence.k, sequence.v))
        if self.spec.latent:
            v = k[..., : self.spec.value_dim]
        return formulas.attention(sequence.q[layer, start:stop], k, v, start, self.spec, self.sinks)


class AttentionTests(BackendKit):
    """Attention through page tables against its formula."""

    def _rig(self, backend: Backend, arena: Arena, spec: str = "grouped", kv_type: str | None = None) -> Rig:
        if kv_type is not None and kv_type not in backend.kv_types:
            pytest.skip(f"{backend.name} has no K/V type {kv_type}")
        return Rig(backend, arena, SPECS[spec], kv_type or backend.kv_types[0], spec.startswith("sinks"))

    def _check(self, rig: Rig, parts: Sequence[tuple[FakeSequence, int, int]], layer: int = 1) -> None:
        for (sequence, start, stop), out in zip(parts, rig.attend(parts, layer), strict=True):
            self.close_to(out, rig.expected(sequence, start, stop, layer), self.kv_tolerance[rig.kv_type])

    @pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
    @pytest.mark.parametrize("spec", SPECS)
    def test_spans_of_all_kinds_in_one_step(self, backend: Backend, arena: Arena, spec: str, kv_type: str) -> None:
        rig = self._rig(backend, arena, spec, kv_type)
        new, one, middle, edge, full = (rig.sequence(10 * i, n) for i, n in enumerate([19, 1, 30, 17, 16]))
        self._check(rig, [(middle, 0, 13), (edge, 0, 16), (full, 0, 15)])
        self._check(rig, [(new, 0, 19), (one, 0, 1), (middle, 13, 30), (edge, 16, 17), (full, 15, 16)])

    @pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK * PAGE, CHUNK * PAGE + 1, 100])
    def test_lengths_at_the_edges_of_pages_and_chunks(self, backend: Backend, arena: Arena, length: int) -> None:
        rig = self._rig(backend, arena)
        sequence = rig.sequence(1, length + 1)
        self._check(rig, [(sequence, 0, length)])
        self._check(rig, [(sequence, length, length + 1)])

    @pytest.mark.parametrize("spec", ["grouped", "window"])
    def test_pages_that_follow_each_other_in_memory(self, backend: Backend, arena: Arena, spec: str) -> None:
        rig = self._rig(backend, arena, spec)
        sequence = rig.sequence(1, 33)
        for table in ([0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [19, 18, 17, 16, 15]):
            sequence.table = np.array(table, np.int32)
            self._check(rig, [(sequence, 0, 20)])
            self._check(rig, [(sequence, 20, 32)])
            self._check(rig, [(sequence, 32, 33)])

    @pytest.mark.parametrize("spec", ["grouped", "latent", "sinks-window"])
    @pytest.mark.parametrize("chunk", [1, 3, PAGE, 20])
    def test_reading_in_chunks_equals_reading_at_once(
        self, backend: Backend, arena: Arena, chunk: int, spec: str
    ) -> None:
        rig = self._rig(backend, arena, spec)
        sequence = rig.sequence(1, 45)
        for start in range(0, 45, chunk):
            self._check(rig, [(sequence, start, min(start + chunk, 45))])

    def test_layers_are_kept_apart(self, backend: Backend, arena: Arena) -> None:
        rig = self._rig(backend, arena)
        sequence = rig.sequence(1, 12)
        for layer in range(LAYERS):
            self._check(rig, [(sequence, 0, 11)], layer)
        for layer in range(LAYERS):
            self._check(rig, [(sequence, 11, 12)], layer)

    def test_sequences_share_the_pages_of_a_prefix(self, backend: Backend, arena: Arena) -> None:
        rig = self._rig(backend, arena)
        first = rig.sequence(1, 30)
        self._check(rig, [(first, 0, 24)])
        second, third = (rig.sequence(seed, 40, first, 2 * PAGE) for seed in (50, 60))
        self._check(rig, [(second, 16, 40), (first, 24, 29), (third, 16, 17)])
        self._check(rig, [(first, 29, 30), (third, 17, 40)])

    def test_rewriting_positions_after_a_rewind(self, backend: Backend, arena: Arena) -> None:
        rig = self._rig(backend, arena)
        sequence = rig.sequence(1, 30)
        self._check(rig, [(sequence, 0, 30)])
        other = rig.sequence(70, 30)
        other.table, other.k[:, :11], other.v[:, :11] = sequence.table, sequence.k[:, :11], sequence.v[:, :11]
        self._check(rig, [(other, 11, 20)])

    def test_a_lone_span_and_a_batched_one_agree(self, backend: Backend, arena: Arena) -> None:
        rig = self._rig(backend, arena)
        sequences = [rig.sequence(10 * i, 21 + i) for i in range(4)]
        alone = [rig.attend([(s, 0, 21)], 0)[0] for s in sequences]
        together = rig.attend([(s, 0, 21) for s in sequences], 0)
        for one, other in zip(alone, together, strict=True):
            self.close_to(one, other.astype(np.float64), self.kv_tolerance[rig.kv_type])

    @pytest.mark.parametrize("spec", ["grouped", "sinks"])
    def test_large_scores_do_not_overflow(self, backend: Backend, arena: Arena, spec: str) -> None:
        rig = self._rig(backend, arena, spec)
        sequence = rig.sequence(1, 20)
        sequence.q *= 100
        self._check(rig, [(sequence, 0, 19)])
        self._check(rig, [(sequence, 19, 20)])

    @pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
    def test_rows_of_zeros_and_of_equal_numbers(self, backend: Backend, arena: Arena, kv_type: str) -> None:
        rig = self._rig(backend, arena, kv_type=kv_type)
        sequence = rig.sequence(1, 10)
        sequence.k[:, 3:5], sequence.v[:, 4:7] = 0, -2.5
        self._check(rig, [(sequence, 0, 9)])
        self._check(rig, [(sequence, 9, 10)])
