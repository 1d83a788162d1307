"""The shadow backend catches host code that does not hold to the compute contract."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata_core.compute.base import Array, AttentionSpec, Batch, PageStore, Span
from strata_core.errors import BackendError
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.testing.shadow import ShadowBackend
from strata_core.testing.wrapped import FaultyBackend

LAYOUT = PageLayout.attention(layers=1, kv_heads=1, head_dim=16, kv_type="f32", page_tokens=4)


@pytest.fixture
def backend() -> ShadowBackend:
    return ShadowBackend(seed=3)


@pytest.fixture
def store(backend: ShadowBackend) -> PageStore:
    return store_of(backend)


def store_of(backend: ShadowBackend) -> PageStore:
    store = backend.page_store(LAYOUT, 8, PortableArena("off"))
    store.add_chunk(0)
    return store


def block(pages: int, value: int = 1) -> np.ndarray:
    return np.full((pages, LAYOUT.nbytes), value, np.uint8)


def batch(*spans: tuple[int, int, list[int]], outputs: list[int] | None = None) -> Batch:
    made = tuple(Span(start, rows, (np.array(table, np.int32),)) for start, rows, table in spans)
    return Batch(np.zeros(sum(s.rows for s in made), np.int32), made, np.array(outputs or [], np.int32))


def shape_of(x: Array) -> object:
    return x.shape


@pytest.mark.parametrize(
    "touch",
    [np.asarray, np.sum, len, list, bool, float, lambda x: x[0], lambda x: x + 1, lambda x: np.ones(3) * x, shape_of],
)
def test_an_array_has_nothing_to_see_on_the_host(backend: ShadowBackend, touch: Callable[[Array], object]) -> None:
    with pytest.raises((BackendError, TypeError, AttributeError)):
        touch(backend.from_host(np.ones((3, 4), np.float32)))


def test_what_to_host_gives_is_a_copy(backend: ShadowBackend) -> None:
    x = backend.from_host(np.ones((2, 3), np.float32))
    backend.to_host(x)[:] = 5
    assert (backend.to_host(x) == 1).all()


def test_an_array_whose_memory_may_be_reused_is_gone(backend: ShadowBackend) -> None:
    x, y = (backend.from_host(np.ones((2, 3), np.float32)) for _ in range(2))
    backend.add(x, y)
    backend.to_host(y)
    with pytest.raises(BackendError, match="reuse its memory"):
        backend.to_host(x)


def test_new_pages_and_pages_under_upload_are_poison(store: PageStore) -> None:
    target = block(2, 0)
    store.download([0, 1], target).wait()
    assert np.isnan(target.view(np.float32)).all()


def test_a_download_that_is_not_waited_for_reads_poison(store: PageStore) -> None:
    store.upload(block(1), [0]).wait()
    target = block(1, 0)
    event = store.download([0], target)
    assert np.isnan(target.view(np.float32)).all()
    event.wait()
    assert (target == 1).all()


def test_a_source_that_is_reused_before_the_upload_is_done_arrives_changed(store: PageStore) -> None:
    source, target = block(1), block(1, 0)
    event = store.upload(source, [0])
    source[:] = 9
    event.wait()
    store.download([0], target).wait()
    assert (target == 9).all()


def test_a_page_must_not_be_named_before_its_upload_is_done(backend: ShadowBackend, store: PageStore) -> None:
    event = store.upload(block(1), [2])
    for misuse in (
        lambda: backend.begin(batch((4, 1, [2, 3])), [store]),
        lambda: backend.begin(batch((0, 1, [2])), [store]),
        lambda: store.copy(2, 3),
        lambda: store.copy(3, 2),
        lambda: store.download([2], block(1)),
        lambda: store.upload(block(1), [2]),
        lambda: store.drop_chunk(0),
    ):
        with pytest.raises(BackendError, match="page 2"):
            misuse()
    event.wait()
    backend.begin(batch((4, 1, [2, 3])), [store])


def test_a_page_must_not_be_written_before_its_download_is_done(backend: ShadowBackend, store: PageStore) -> None:
    store.upload(block(1), [2]).wait()
    event = store.download([2], block(1))
    for misuse in (
        lambda: backend.begin(batch((0, 1, [2])), [store]),
        lambda: store.copy(3, 2),
        lambda: store.upload(block(1), [2]),
        lambda: store.drop_chunk(0),
    ):
        with pytest.raises(BackendError, match="page 2"):
            misuse()
    backend.begin(batch((4, 1, [2, 3])), [store])  # reading is allowed
    store.copy(2, 4)
    event.wait()
    store.drop_chunk(0)


def test_copies_take_a_while_and_may_overtake_each_other() -> None:
    store = store_of(ShadowBackend(seed=1))
    events = [store.upload(block(1), [page]) for page in range(8)]
    assert not any(event.done() for event in events[:1])
    finished: list[int] = []
    while len(finished) < 8:
        finished += [i for i, event in enumerate(events) if i not in finished and event.done()]
    assert finished != sorted(finished)


def test_a_failed_copy_says_so_when_waited_for() -> None:
    store = store_of(ShadowBackend(fail_copies={1}))
    store.upload(block(1), [0]).wait()
    event = store.upload(block(1), [1])
    with pytest.raises(BackendError, match="copy 1"):
        event.wait()
    assert event.done()


@pytest.mark.parametrize(
    "wrong",
    [
        batch((0, 5, [1])),
        batch((0, 2, [1]), (0, 3, [1])),
        batch((4, 1, [1, 2]), (0, 1, [1])),
        batch((4, 1, [1, 1])),
        batch((0, 2, [1]), outputs=[1, 0]),
        batch((0, 2, [1]), outputs=[2]),
        batch((0, 1, [8])),
    ],
    ids=["table-too-short", "two-writers", "writer-and-reader", "page-twice", "unordered", "out-of-range", "no-chunk"],
)
def test_a_batch_that_breaks_the_contract_is_refused(backend: ShadowBackend, store: PageStore, wrong: Batch) -> None:
    with pytest.raises(BackendError):
        backend.begin(wrong, [store])


def test_a_faulty_backend_fails_the_chosen_step_only() -> None:
    faulty = FaultyBackend(ShadowBackend(), {1})
    store = store_of(faulty.inner)  # type: ignore[arg-type]
    spec = AttentionSpec(1, 1, 16, 16, 0.25)
    for number in range(3):
        step = faulty.begin(batch((number, 1, [0])), [store])
        q, k, v = (faulty.from_host(np.ones((1, 16), np.float32)) for _ in range(3))
        if number == 1:
            with pytest.raises(BackendError, match="step 1"):
                faulty.attention(step, (0, 0), q, k, v, spec)
        else:
            assert (faulty.to_host(faulty.attention(step, (0, 0), q, k, v, spec)) == 1).all()
