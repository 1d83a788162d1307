"""The RAM level's account: a hard bound over all parts, shared prefixes held and counted once, memory really freed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.errors import DamagedEntry, LevelError
from strata_core.memory.arena import PortableArena
from strata_core.pool.pool import PagePool
from strata_core.store.base import Entry
from strata_core.store.ram import ENTRY_OVERHEAD, RamLevel
from strata_core.testing.scene import LAYOUTS, Scene, numpy_store
from strata_core.testing.shadow import ShadowBackend

[LAYOUT] = LAYOUTS["one layout"]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene.build([LAYOUT])
    yield scene
    assert scene.used == 0


def ram(scene: Scene, max_bytes: int = 1 << 20, max_entries: int = 100) -> RamLevel:
    return RamLevel(scene.pools, copies=False, max_bytes=max_bytes, max_entries=max_entries)


def test_one_entry_that_exceeds_the_bound_is_refused_before_anything_is_kept(scene: Scene) -> None:
    level = ram(scene, max_bytes=ram(scene).cost(scene.entry(range(40))) - 1)
    with pytest.raises(LevelError, match="no room in RAM: 0 bytes held"):
        scene.put(level, range(40))
    assert (level.usage().bytes, scene.used) == (0, 0)


def test_ids_and_addresses_are_counted_beside_the_pages(scene: Scene) -> None:
    entry = scene.entry(range(10))
    assert ram(scene).cost(entry) == 3 * LAYOUT.nbytes + 10 * 4 + 2 * 16 + ENTRY_OVERHEAD


def test_no_more_than_max_entries_are_kept(scene: Scene) -> None:
    level = ram(scene, max_entries=2)
    scene.put(level, [1])
    scene.put(level, [2])
    with pytest.raises(LevelError):
        scene.put(level, [3])
    assert level.usage().entries == 2
    level.close()


def test_a_common_prefix_is_held_and_counted_once(scene: Scene) -> None:
    level, system = ram(scene), list(range(100, 140))
    scene.put(level, [*system, 1, 1])
    before, used = level.usage().bytes, scene.used
    for tail in range(2, 6):
        scene.put(level, [*system, tail, tail])
    assert scene.used == used + 4  # a page for each tail
    assert level.usage().bytes - before == 4 * (LAYOUT.nbytes + 42 * 4 + 10 * 16 + ENTRY_OVERHEAD)
    level.close()


def test_pages_that_parked_conversations_have_no_more_use_for_are_free(scene: Scene) -> None:
    level = ram(scene, max_bytes=16 << 20)
    entries = [scene.put(level, [number] * 200) for number in range(20)]
    assert scene.pools[0].capacity >= 1000
    for entry in entries[1:]:
        level.remove(entry)
    assert scene.used == 50
    assert scene.pools[0].capacity <= 50 + 2 * 8  # in chunks of 8, of which one is empty
    level.close()
    assert scene.pools[0].capacity == 8


def test_held_pages_are_the_ones_that_were_put(scene: Scene) -> None:
    level, entry = ram(scene), scene.entry(range(10))
    pages = scene.pages(entry)
    level.put(entry, pages)
    held = level.held(entry)
    assert held is not None
    assert held.tables == pages.tables
    assert scene.used == 3  # nothing was copied
    pages.release()
    level.close()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=14), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_account_is_the_pages_held(sequences: list[list[int]], random: object) -> None:
    scene = Scene.build([LAYOUT])
    level, held = ram(scene), list[Entry]()
    for number, tokens in enumerate(sequences):
        if held and number % 4 == 3:
            level.remove(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        else:
            held.append(scene.put(level, tokens))
        described = sum(e.tokens.nbytes + 16 * len(e.addresses) + ENTRY_OVERHEAD for e in held)
        assert level.usage().bytes == level.weigh(held) == scene.used * LAYOUT.nbytes + described
    level.close()
    assert scene.used == 0


# -- copies of a device's pages ---------------------------------------------------------------------------------------


class Device:
    """A scene on the shadow backend, and a RAM level that copies from it."""

    def __init__(self, fail_copies: tuple[int, ...] = (), host_pages: int = 1000):
        device = ShadowBackend(seed=3, fail_copies=fail_copies)
        self.scene = Scene.build([LAYOUT], lambda layout: device.page_store(layout, 8, PortableArena("off")))
        self.host = PagePool(numpy_store(LAYOUT), host_pages)
        self.level = RamLevel([self.host], copies=True, max_bytes=1 << 20, max_entries=100)

    def check_contents(self, entry: Entry) -> None:
        pages = self.scene.restore(self.level, entry, len(entry.tokens))
        assert self.scene.holds(pages, entry)
        pages.release()

    def close(self) -> None:
        self.level.close()
        assert (self.scene.used, self.host.used) == (0, 0)


def test_device_pages_are_given_back_when_the_copies_are_done() -> None:
    device = Device()
    entry = device.scene.put(device.level, range(20))
    assert device.level.busy()
    assert device.scene.used == 5
    while device.level.busy():
        device.level.poll()
    assert (device.scene.used, device.host.used) == (0, 5)
    device.check_contents(entry)
    device.close()


def test_settling_gives_device_pages_back_at_once() -> None:
    device = Device()
    device.scene.put(device.level, range(20))
    device.level.settle()
    assert not device.level.busy()
    assert device.scene.used == 0
    device.close()


def test_a_copy_under_way_for_another_entry_is_waited_for_too() -> None:
    device = Device()
    device.scene.put(device.level, range(20))
    second = device.scene.put(device.level, [*range(16), 99, 98])  # shares pages that are still being copied
    assert device.host.used == 6
    device.check_contents(second)
    device.close()


def test_removing_an_entry_whose_pages_another_waits_for_harms_it_not() -> None:
    device = Device()
    first = device.scene.put(device.level, range(20))
    second = device.scene.put(device.level, [*range(16), 99, 98])
    device.level.remove(first)
    device.check_contents(second)
    device.close()


@pytest.mark.parametrize("failing", range(1, 10, 2))
def test_a_copy_that_fails_makes_the_entry_damaged_and_leaks_nothing(failing: int) -> None:
    # Uploads that fill the device's pages and downloads that park them are counted together: 5 pages, 5 copies.
    device = Device(fail_copies=(5 + failing // 2,))
    entry = device.scene.put(device.level, range(20))
    assert device.level.held(entry) is None
    with pytest.raises(DamagedEntry):
        device.check_contents(entry)
    assert device.level.find(device.scene.query(range(20))) == []
    device.check_contents(device.scene.put(device.level, range(20)))  # and it can be kept again
    device.close()


def test_an_entry_that_shares_a_page_whose_copy_failed_is_damaged_as_well() -> None:
    device = Device(fail_copies=(5,))
    device.scene.put(device.level, range(20))
    second = device.scene.put(device.level, [*range(16), 99, 98])
    with pytest.raises(DamagedEntry):
        device.check_contents(second)
    device.close()


def test_pages_of_a_damaged_entry_are_not_shared() -> None:
    device = Device(fail_copies=(5,))
    device.scene.put(device.level, range(20))
    device.level.settle()
    device.check_contents(device.scene.put(device.level, [*range(16), 99, 98]))
    device.close()


def test_without_host_pages_nothing_is_kept() -> None:
    device = Device(host_pages=7)
    entry = device.scene.put(device.level, range(20))
    with pytest.raises(LevelError, match="7 pages"):
        device.scene.put(device.level, range(100, 120))
    assert device.level.usage().entries == 1
    assert device.host.used == 5
    device.check_contents(entry)
    device.close()


def test_a_restore_reads_what_was_parked_although_the_device_pages_changed() -> None:
    device = Device()
    entry = device.scene.entry(range(8))
    pages = device.scene.pages(entry)
    device.level.put(entry, pages)
    device.level.settle()
    device.scene.pools[0].store.upload(np.zeros((2, LAYOUT.nbytes), np.uint8), pages.tables[0]).wait()
    pages.release()
    device.check_contents(entry)
    device.close()
