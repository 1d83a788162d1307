"""Restores fill fresh pages: nothing is handed out that is incomplete, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pool_stores import MakeStore

from strata_core.errors import LevelError, OutOfMemory
from strata_core.memory.arena import PortableArena
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.testing.scene import LAYOUTS, Scene
from strata_core.testing.shadow import ShadowBackend


@pytest.fixture
def scene(make_store: MakeStore) -> Iterator[Scene]:
    scene = Scene.build(LAYOUTS["two layouts"], make_store, max_pages=16)
    yield scene
    assert scene.used == 0


def test_blocks_may_be_put_or_filled_in_any_order(scene: Scene) -> None:
    entry = scene.entry(range(14))
    sink = PageSink(scene.pools, 14)
    assert sink.blocks == 4
    for number in (2, 0, 3, 1):
        block = scene.blocks(entry)[number]
        if number % 2:
            sink.put(number, block)
        else:
            for buffer, content in zip(sink.buffers(number), block, strict=True):
                assert buffer.dtype == np.uint8
                buffer[:] = content
            sink.filled(number)
    pages = sink.finish()
    assert pages.tokens == 14
    assert scene.holds(pages, entry)
    pages.release()


def test_a_sink_without_room_holds_nothing(scene: Scene) -> None:
    with pytest.raises(OutOfMemory):
        PageSink(scene.pools, 17 * scene.page_tokens)


def test_a_missing_block_is_an_error_and_gives_all_pages_back(scene: Scene) -> None:
    sink = PageSink(scene.pools, 9)
    for number in (0, 2):
        sink.put(number, scene.blocks(scene.entry(range(9)))[number])
    with pytest.raises(LevelError, match="1 of 3 blocks"):
        sink.finish()


def test_buffers_that_were_not_declared_filled_count_as_missing(scene: Scene) -> None:
    sink = PageSink(scene.pools, 4)
    for buffer in sink.buffers(0):
        buffer[:] = 1
    with pytest.raises(LevelError, match="1 of 1"):
        sink.finish()


def test_discarding_gives_all_pages_back_also_with_copies_under_way(scene: Scene) -> None:
    sink = PageSink(scene.pools, 12)
    for number, block in enumerate(scene.blocks(scene.entry(range(9)))):
        sink.put(number, block)
    sink.discard()


def test_nothing_is_restored_of_no_tokens(scene: Scene) -> None:
    pages = PageSink(scene.pools, 0).finish()
    assert pages.tables == ((), ())


@pytest.mark.parametrize("failing", range(4))
def test_a_copy_that_fails_is_an_error_of_the_restore_after_all_others_ended(failing: int) -> None:
    [layout] = LAYOUTS["one layout"]
    device = ShadowBackend(seed=2, fail_copies=[failing])
    scene = Scene((PagePool(device.page_store(layout, 4, PortableArena("off")), 16),), Scene.build([layout]).identity)
    sink = PageSink(scene.pools, 16)
    for number, block in enumerate(scene.blocks(scene.entry(range(16)))):
        sink.put(number, block)
    with pytest.raises(LevelError, match=f"copy {failing} failed"):
        sink.finish()
    assert scene.used == 0
    scene.pages(scene.entry(range(16))).release()  # the pages can be written again: no copy is under way
