"""Conformance of attention over positions that an indexer chooses."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Backend, Indexer, PageStore, Rotation, Span
from strata_core.memory.arena import Arena
from strata_core.pool.layout import PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, begin, random_rows, stored

PAGE, CHUNK, CHUNKS, LAYERS = 8, 5, 4, 2
SPEC = AttentionSpec(heads=6, kv_heads=2, head_dim=16, value_dim=16, scale=0.25)
FREQUENCIES = (10_000.0 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32)


@attrs.define(eq=False)
class FakeSparse:
    """One sequence: its page table, and what projections gave for every position; the same in all layers."""

    table: NDArray[np.int32]
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    index_q: NDArray[np.float32]
    index_k: NDArray[np.float32]


class SparseRig:
    """A page store with poisoned pages, and an indexer that chooses ``top`` blocks of ``block`` positions."""

    def __init__(self, backend: Backend, arena: Arena, kv_type: str, block: int, top: int, interleaved: bool = False):
        self.backend, self.kv_type = backend, kv_type
        self.key_norm = np.abs(random_rows(9, 16)) + np.float32(0.5)
        self.indexer = Indexer(
            heads=3,
            dim=16,
            block=block,
            top=top,
            key_norm=backend.vector(stored(self.key_norm)),
            eps=1e-6,
            rotation=Rotation(FREQUENCIES, interleaved),
        )
        layout = PageLayout.attention(
            layers=LAYERS, kv_heads=2, head_dim=16, kv_type=kv_type, page_tokens=PAGE, index_dim=16
        )
        self.store: PageStore = backend.page_store(layout, CHUNK, arena)
        for chunk in range(CHUNKS):
            self.store.add_chunk(chunk)
        pages = list(range(CHUNK * CHUNKS))
        self.store.upload(np.full((len(pages), layout.nbytes), 0xFF, np.uint8), pages).wait()
        self._free = np.random.default_rng(5).permutation(pages).tolist()

    def sequence(self, seed: int, length: int) -> FakeSparse:
        pages = [self._free.pop() for _ in range(self.store.layout.pages_for(length))]
        shapes = (SPEC.heads, 16), (2, 16), (2, 16), (self.indexer.heads, 16), (1, 16)
        arrays = (random_rows(seed + i, length, *shape) for i, shape in enumerate(shapes))
        return FakeSparse(np.array(pages, np.int32), *arrays)

    def attend(self, parts: Sequence[tuple[FakeSparse, int, int]], layer: int = 1) -> list[NDArray[np.float32]]:
        """One step over rows ``start .. stop - 1`` of each sequence; the result of each."""
        spans = [Span(start, stop - start, (sequence.table,)) for sequence, start, stop in parts]
        step = begin(self.backend, spans, [self.store])

        def rows(name: str) -> NDArray[np.float32]:
            joined = np.concatenate([getattr(sequence, name)[start:stop] for sequence, start, stop in parts])
            return self.backend.from_host(joined.reshape(len(joined), -1))  # type: ignore[no-any-return]

        q, k, v, index_q, index_k = (rows(name) for name in ("q", "k", "v", "index_q", "index_k"))
        out = self.backend.indexed_attention(step, (0, layer), q, k, v, SPEC, index_q, index_k, self.indexer)
        return np.split(self.backend.to_host(out), np.cumsum([span.rows for span in spans])[:-1])

    def expected(self, sequence: FakeSparse, start: int, stop: int) -> NDArray[np.float64]:
        index_k = formulas.through("f32" if self.kv_type == "f32" else "f16", sequence.index_k[:, 0])
        out = []
        for row in range(start, stop):
            chosen = formulas.chosen_positions(sequence.index_q[row], index_k, row, self.indexer, self.key_norm)
            k, v = (formulas.through(self.kv_type, rows[chosen]) for rows in (sequence.k, sequence.v))
            out.append(formulas.attention(sequence.q[row : row + 1], k, v, len(chosen) - 1, SPEC))
        return np.concatenate(out)


class IndexedTests(BackendKit):
    """Sparse attention through page tables against its formula, with budgets that leave most positions out."""

    def _sparse_rig(
        self, backend: Backend, arena: Arena, kv_type: str = "", block: int = 4, top: int = 3, interleaved: bool = False
    ) -> SparseRig:
        if kv_type and kv_type not in backend.kv_types:
            pytest.skip(f"{backend.name} has no K/V type {kv_type}")
        return SparseRig(backend, arena, kv_type or backend.kv_types[0], block, top, interleaved)

    def _check_sparse(self, rig: SparseRig, parts: Sequence[tuple[FakeSparse, int, int]]) -> None:
        for (sequence, start, stop), out in zip(parts, rig.attend(parts), strict=True):
            self.close_to(out, rig.expected(sequence, start, stop), self.kv_tolerance[rig.kv_type])

    @pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
    def test_sparse_spans_of_all_kinds_in_one_step(self, backend: Backend, arena: Arena, kv_type: str) -> None:
        rig = self._sparse_rig(backend, arena, kv_type)
        new, one, middle, edge = (rig.sequence(10 * i, n) for i, n in enumerate([19, 1, 50, 41]))
        self._check_sparse(rig, [(middle, 0, 33), (edge, 0, 40)])
        self._check_sparse(rig, [(new, 0, 19), (one, 0, 1), (middle, 33, 50), (edge, 40, 41)])

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("block, top", [(1, 5), (3, 2), (4, 1), (16, 2), (4, 100)])
    def test_index_blocks_of_any_size(
        self, backend: Backend, arena: Arena, block: int, top: int, interleaved: bool
    ) -> None:
        rig = self._sparse_rig(backend, arena, block=block, top=top, interleaved=interleaved)
        sequence = rig.sequence(1, 60)
        self._check_sparse(rig, [(sequence, 0, 57)])
        for start in range(57, 60):
            self._check_sparse(rig, [(sequence, start, start + 1)])

    @pytest.mark.parametrize("chunk", [1, 5, PAGE])
    def test_sparse_reading_in_chunks_equals_reading_at_once(self, backend: Backend, arena: Arena, chunk: int) -> None:
        rig = self._sparse_rig(backend, arena)
        sequence = rig.sequence(1, 45)
        for start in range(0, 45, chunk):
            self._check_sparse(rig, [(sequence, start, min(start + chunk, 45))])

    @pytest.mark.parametrize("rows", [1, 3])
    def test_of_equal_scores_the_earlier_block_is_attended(self, backend: Backend, arena: Arena, rows: int) -> None:
        rig = self._sparse_rig(backend, arena)
        sequence = rig.sequence(1, 40)
        sequence.index_q[:] = 0  # so that all scores are 0
        self._check_sparse(rig, [(sequence, 0, 40 - rows)])
        self._check_sparse(rig, [(sequence, 40 - rows, 40)])

    def test_sparse_layers_are_kept_apart(self, backend: Backend, arena: Arena) -> None:
        rig = self._sparse_rig(backend, arena)
        sequence, other = rig.sequence(1, 40), rig.sequence(20, 40)
        other.table = sequence.table
        rig.attend([(sequence, 0, 39)], layer=1)
        rig.attend([(other, 0, 39)], layer=0)
        self._check_sparse(rig, [(sequence, 39, 40)])
