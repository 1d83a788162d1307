"""Conformance of page stores: contents, copies, events, chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Backend, PageStore, Span
from strata_core.memory.arena import Arena
from strata_core.pool.layout import KV_TYPES, PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, begin, random_rows

SPEC = AttentionSpec(heads=2, kv_heads=2, head_dim=16, value_dim=16, scale=0.25)


def layout_of(kv_type: str) -> PageLayout:
    return PageLayout.attention(layers=2, kv_heads=2, head_dim=16, kv_type=kv_type, page_tokens=8)


def random_bytes(seed: int, pages: int, layout: PageLayout) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (pages, layout.nbytes), np.uint8)


def read(store: PageStore, pages: list[int]) -> NDArray[np.uint8]:
    target = np.zeros((len(pages), store.layout.nbytes), np.uint8)
    store.download(pages, target).wait()
    return target


class PageTests(BackendKit):
    """The memory that pages live in."""

    @pytest.fixture
    def store(self, backend: Backend, arena: Arena) -> Iterator[PageStore]:
        store = backend.page_store(layout_of(backend.kv_types[0]), 4, arena)
        store.add_chunk(0)
        store.add_chunk(2)
        yield store
        store.close()

    def test_what_is_uploaded_is_downloaded(self, store: PageStore) -> None:
        pages, data = [9, 1, 8, 3], random_bytes(1, 4, store.layout)
        store.upload(data.copy(), pages).wait()
        assert np.array_equal(read(store, pages), data)
        assert np.array_equal(read(store, [3, 9]), data[[3, 0]])

    def test_an_event_is_done_some_time_without_being_waited_for(self, store: PageStore) -> None:
        data = random_bytes(1, 1, store.layout)
        event = store.upload(data, [2])
        for _ in range(1_000_000):
            if event.done():
                break
        assert event.done()
        assert np.array_equal(read(store, [2]), data)

    def test_events_may_be_waited_for_by_another_thread(self, store: PageStore) -> None:
        data, target = random_bytes(1, 2, store.layout), np.zeros((2, store.layout.nbytes), np.uint8)
        store.upload(data, [0, 9]).wait()
        event = store.download([0, 9], target)
        thread = threading.Thread(target=event.wait)
        thread.start()
        thread.join()
        assert event.done()
        assert np.array_equal(target, data)

    def test_many_copies_under_way_do_not_mix(self, store: PageStore) -> None:
        data = random_bytes(1, 8, store.layout)
        pages = [0, 1, 2, 3, 8, 9, 10, 11]
        for event in [store.upload(data[i : i + 1], [page]) for i, page in enumerate(pages)]:
            event.wait()
        targets = [np.zeros((1, store.layout.nbytes), np.uint8) for _ in pages]
        for event in [store.download([page], target) for page, target in zip(pages, targets, strict=True)]:
            event.wait()
        assert np.array_equal(np.concatenate(targets), data)

    def test_copy_duplicates_a_page_across_chunks(self, store: PageStore) -> None:
        data = random_bytes(1, 1, store.layout)
        store.upload(data, [1]).wait()
        store.copy(1, 10)
        store.copy(10, 11)
        assert np.array_equal(read(store, [1, 10, 11]), np.repeat(data, 3, axis=0))

    def test_copying_no_pages_is_done(self, store: PageStore) -> None:
        nothing = np.zeros((0, store.layout.nbytes), np.uint8)
        store.download([], nothing).wait()
        store.upload(nothing, []).wait()

    def test_a_dropped_chunk_leaves_the_others_and_may_come_back(self, store: PageStore) -> None:
        data = random_bytes(1, 2, store.layout)
        store.upload(data, [2, 9]).wait()
        store.drop_chunk(0)
        store.add_chunk(1)
        store.upload(random_bytes(2, 1, store.layout), [5]).wait()
        store.add_chunk(0)
        store.upload(data[:1], [3]).wait()
        assert np.array_equal(read(store, [9, 3]), data[[1, 0]])

    def test_host_views_are_the_pages_where_memory_is_the_hosts(self, backend: Backend, store: PageStore) -> None:
        view = store.host_view(9)
        assert (view is not None) == backend.host_memory
        if view is not None:
            data = random_bytes(1, 1, store.layout)
            store.upload(data, [9]).wait()
            assert view.shape == (store.layout.nbytes,)
            assert np.array_equal(view, data[0])

    @pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
    def test_attention_writes_rows_where_the_layout_says(self, backend: Backend, arena: Arena, kv_type: str) -> None:
        if kv_type not in backend.kv_types:
            pytest.skip(f"{backend.name} has no K/V type {kv_type}")
        layout = layout_of(kv_type)
        store = backend.page_store(layout, 4, arena)
        store.add_chunk(0)
        rows = [random_rows(seed, 11, 32) for seed in range(3)]
        for array in rows:  # some numbers exactly between two of bf16: ties go to the even one
            array[:3] = ((array[:3].view(np.uint32) & 0xFFFF0000) | 0x8000).view(np.float32)
        step = begin(backend, [Span(0, 11, (np.array([2, 0], np.int32),))], [store])
        q, k, v = map(backend.from_host, rows)
        backend.attention(step, (0, 1), q, k, v, SPEC)
        pages = read(store, [2, 0])  # asked for right after the step, without waiting for it
        for part in (0, 1):
            stored = layout.view(pages, 1, part).swapaxes(1, 2).reshape(16, 2, 16)[:11]
            expected = formulas.through(kv_type, rows[1 + part].reshape(11, 2, 16))
            self.close_to(self._decoded(layout, pages, stored, part), expected, self.kv_tolerance[kv_type])

    @staticmethod
    def _decoded(
        layout: PageLayout, pages: NDArray[np.uint8], stored: NDArray[np.generic], part: int
    ) -> NDArray[np.float32]:
        if layout.kv_type == "bf16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if KV_TYPES[layout.kv_type][1]:
            scales = layout.view(pages, 1, part + 2).swapaxes(1, 2).reshape(16, 2, 1)[:11]
            return np.asarray(stored.astype(np.float32) * scales, np.float32)
        return stored.astype(np.float32)

    def test_a_copied_page_diverges_without_touching_the_original(self, backend: Backend, store: PageStore) -> None:
        rows = [random_rows(seed, 6, 32) for seed in range(3)]

        def attend(table: list[int], start: int, arrays: list[NDArray[np.float32]]) -> NDArray[np.float32]:
            step = begin(backend, [Span(start, len(arrays[0]), (np.array(table, np.int32),))], [store])
            q, k, v = map(backend.from_host, arrays)
            return backend.to_host(backend.attention(step, (0, 0), q, k, v, SPEC))

        attend([1], 0, [r[:5] for r in rows])
        store.copy(1, 8)
        attend([8], 2, [r[:3] + 1 for r in rows])
        last = attend([1], 5, [r[5:] for r in rows])
        k, v = (formulas.through(store.layout.kv_type, r.reshape(6, 2, 16)) for r in rows[1:])
        expected = formulas.attention(rows[0].reshape(6, 2, 16)[5:], k, v, 5, SPEC)
        self.close_to(last, expected, self.kv_tolerance[store.layout.kv_type])
