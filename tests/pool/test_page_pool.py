from __future__ import annotations

import numpy as np
import pytest
from pool_stores import MakeStore

from strata_core.errors import BackendError, OutOfMemory
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import CHUNK_BYTES, PagePool, chunk_pages_for
from strata_core.testing.scene import LAYOUTS

[LAYOUT] = LAYOUTS["one layout"]
CHUNK = 8


@pytest.fixture
def pool(make_store: MakeStore) -> PagePool:
    return PagePool(make_store(LAYOUT), max_pages=40)


def write(pool: PagePool, page: int, value: int) -> None:
    pool.store.upload(np.full((1, LAYOUT.nbytes), value, np.uint8), [page]).wait()


def read(pool: PagePool, page: int) -> int:
    row = np.empty((1, LAYOUT.nbytes), np.uint8)
    pool.store.download([page], row).wait()
    assert (row == row[0, 0]).all()
    return int(row[0, 0])


def test_pages_are_distinct_until_they_are_released(pool: PagePool) -> None:
    pages = [pool.allocate() for _ in range(20)]
    assert len(set(pages)) == pool.used == 20
    assert pool.capacity == 24
    assert pool.nbytes == 24 * LAYOUT.nbytes


def test_the_last_release_frees_a_page(pool: PagePool) -> None:
    page = pool.allocate()
    pool.retain(page)
    pool.release(page)
    assert (pool.holders(page), pool.used) == (1, 1)
    pool.release(page)
    assert (pool.holders(page), pool.used) == (0, 0)


def test_no_more_than_max_pages_are_given_out(pool: PagePool) -> None:
    pages = [pool.allocate() for _ in range(40)]
    with pytest.raises(OutOfMemory, match="40 pages of the 'full' pool"):
        pool.allocate()
    pool.release(pages.pop())
    pool.allocate()


def test_a_page_of_which_one_is_the_only_holder_is_not_copied(pool: PagePool) -> None:
    page = pool.allocate()
    assert pool.own(page) == page
    assert pool.used == 1


def test_owning_a_shared_page_copies_it_and_leaves_the_other_holder_its_own(pool: PagePool) -> None:
    page = pool.allocate()
    write(pool, page, 7)
    pool.retain(page)
    mine = pool.own(page)
    assert mine != page
    assert (pool.holders(page), pool.holders(mine)) == (1, 1)
    write(pool, mine, 9)
    assert (read(pool, page), read(pool, mine)) == (7, 9)


def test_owning_without_room_for_the_copy_keeps_the_hold(make_store: MakeStore) -> None:
    pool = PagePool(make_store(LAYOUT), max_pages=1)
    page = pool.allocate()
    pool.retain(page)
    with pytest.raises(OutOfMemory):
        pool.own(page)
    assert pool.holders(page) == 2


def test_a_copy_that_fails_leaves_no_page_behind(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: int, target: int) -> None:
        raise BackendError("no copy")

    page = pool.allocate()
    pool.retain(page)
    monkeypatch.setattr(pool.store, "copy", fail)
    with pytest.raises(BackendError):
        pool.own(page)
    assert (pool.holders(page), pool.used) == (2, 1)


def test_low_chunks_are_filled_first_so_that_high_ones_run_empty(pool: PagePool) -> None:
    pages = [pool.allocate() for _ in range(3 * CHUNK)]
    pool.release(pages[1])
    pool.release(pages[2 * CHUNK])
    assert pool.allocate() == pages[1]


def test_all_empty_chunks_but_one_are_given_back(pool: PagePool) -> None:
    pages = [pool.allocate() for _ in range(5 * CHUNK)]
    assert pool.capacity == 5 * CHUNK
    kept = pages.pop(3 * CHUNK + 1)
    for page in pages:
        pool.release(page)
    assert pool.capacity == 2 * CHUNK  # the kept page's, and one empty
    pool.release(kept)
    assert pool.capacity == CHUNK


def test_at_the_edge_of_a_chunk_memory_is_not_taken_and_given_back_each_time(pool: PagePool) -> None:
    for _ in range(CHUNK):
        pool.allocate()
    edge = pool.allocate()
    for _ in range(3):
        pool.release(edge)
        assert pool.capacity == 2 * CHUNK
        edge = pool.allocate()


def test_without_memory_for_a_chunk_nothing_changes(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(chunk: int) -> None:
        raise OutOfMemory("no chunk")

    monkeypatch.setattr(pool.store, "add_chunk", refuse)
    with pytest.raises(OutOfMemory, match="no chunk"):
        pool.allocate()
    assert (pool.used, pool.capacity) == (0, 0)
    monkeypatch.undo()
    assert pool.allocate() == 0


def test_a_chunk_is_of_moderate_size_and_holds_at_least_a_page() -> None:
    huge = PageLayout.attention(layers=80, kv_heads=64, head_dim=256, kv_type="f32", page_tokens=32)
    assert chunk_pages_for(huge) == 1
    assert chunk_pages_for(LAYOUT) * LAYOUT.nbytes <= CHUNK_BYTES < (chunk_pages_for(LAYOUT) + 1) * LAYOUT.nbytes


@pytest.mark.parametrize("exchanged", [1, 17])
def test_what_is_exchanged_again_and_again_keeps_its_memory(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, exchanged: int
) -> None:
    store, added = make_store(LAYOUT), list[int]()
    add = store.add_chunk
    monkeypatch.setattr(store, "add_chunk", lambda chunk: added.append(chunk) or add(chunk))
    pool = PagePool(store, max_pages=40, exchanged=exchanged)
    held = [pool.allocate() for _ in range(exchanged)]
    for _ in range(5):
        fresh = [pool.allocate() for _ in range(exchanged)]
        for page in held:
            pool.release(page)
        held = fresh
    assert len(added) == len(set(added)), "no chunk is allocated twice"
    for page in held:
        pool.release(page)
    assert pool.capacity == -(-exchanged // CHUNK) * CHUNK
