"""What is written, and how often: common beginnings once, growth in part, bursts once; queues and times are bounded."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from disk_kit import drain, du, files_in, ids, new_scene, open_level, shape_of, whole
from strata_tiers import manifest
from strata_tiers.archive import DiskArchive
from strata_tiers.check import check
from strata_tiers.cut import Limits
from strata_tiers.files import Files
from strata_tiers.holdings import Holdings
from strata_tiers.level import Workshop
from strata_tiers.shelf import ArchiveOptions
from strata_tiers.writer import Writer

from strata_core.errors import LevelError
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.testing.scene import Scene, numpy_store
from strata_core.testing.shadow import ShadowBackend

#: 4 KiB per position.
LAYOUT = PageLayout.attention(layers=4, kv_heads=2, head_dim=128, kv_type="f16", page_tokens=32)


def test_a_grown_conversation_writes_little_more_than_what_is_new(tmp_path: Path) -> None:
    scene = Scene.build([LAYOUT], numpy_store)
    level = open_level(scene, tmp_path)
    scene.put(level, ids(1, 2000), turns=(0, 400, 900, 1500, 1700), conversation="one")
    drain(level)
    before = du(tmp_path)
    grown = scene.put(level, ids(1, 2200), turns=(0, 400, 900, 1500, 1700, 2010, 2100), conversation="one")
    [outcome] = drain(level)
    assert outcome.nbytes <= 0.15 * level.weigh([grown])
    assert du(tmp_path) - before <= 0.15 * level.weigh([grown])
    assert whole(scene, level, grown)
    level.close()


def test_four_conversations_store_their_system_prompt_once(tmp_path: Path) -> None:
    scene = Scene.build([LAYOUT], numpy_store)
    level = open_level(scene, tmp_path)
    system = ids(1, 1000)
    for seed in range(4):
        scene.put(level, np.append(system, ids(10 + seed, 200)), turns=(0, 1000, 1100))
    drain(level)
    blocks = 31 + 4 * 7  # 992 positions once, 208 of each conversation
    assert blocks * LAYOUT.nbytes <= du(tmp_path) <= blocks * LAYOUT.nbytes + (400 << 10)
    level.close()


class Gate(Files):
    """Holds the writer where files are created until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open_now = threading.Event()

    def create(self, path: Path) -> int:
        self.open_now.wait()
        return super().create(path)


def test_a_burst_of_states_of_one_conversation_writes_the_newest(tmp_path: Path) -> None:
    scene, files = new_scene(), Gate()
    level = open_level(scene, tmp_path, files=files)
    scene.put(level, ids(9, 8))  # what the writer is busy with
    time.sleep(0.05)
    states = [scene.put(level, ids(1, 20 + 4 * n), conversation="one") for n in range(6)]
    assert all(whole(scene, level, state) for state in states)
    files.open_now.set()
    stored: list[Any] = []
    while level.busy():
        for outcome in level.poll():
            stored.append(outcome.entry.id)
            if outcome.entry.id == states[-1].id:  # what a coordinator does with those that are superseded
                for older in states[:-1]:
                    level.remove(older)
    assert stored[1:] == [states[-1].id]
    assert level.usage().entries == 2
    level.close()
    assert scene.used == 0


def test_the_queue_is_bounded_and_says_so(tmp_path: Path) -> None:
    scene, files = new_scene(), Gate()
    level = open_level(scene, tmp_path, workshop=Workshop(Writer(files, queue_bytes=40 << 10)))
    taken, used = [scene.put(level, ids(1, 20))], 0
    with pytest.raises(LevelError, match="the disk is behind"):
        for seed in range(2, 50):
            used = scene.used
            taken.append(scene.put(level, ids(seed, 20)))
    assert scene.used == used
    assert len(level.entries()) == len(taken) < 20
    files.open_now.set()
    drain(level)
    assert all(whole(scene, level, entry) for entry in taken)
    level.close()
    assert scene.used == 0


def test_putting_and_polling_never_wait_for_the_disk(tmp_path: Path) -> None:
    scene, files = new_scene(), Gate()
    level = open_level(scene, tmp_path, files=files)
    entry = scene.put(level, ids(1, 20))
    level.poll()
    assert level.busy()
    held = level.held(entry)
    assert held is not None
    assert scene.holds(held, entry)
    assert files_in(tmp_path) == []
    files.open_now.set()
    level.close()


@pytest.mark.parametrize("states", [(), (640, 1280, 2000)])
def test_pages_of_a_device_are_staged_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[int, ...]
) -> None:
    from strata_tiers import pages

    monkeypatch.setattr(pages, "STAGING_BYTES", 8 * LAYOUT.nbytes)
    state = PageLayout.state([("delta", 2, 3 * LAYOUT.nbytes // 4)]) if states else None
    scene = Scene.build(
        [LAYOUT], lambda layout: ShadowBackend(seed=1).page_store(layout, 8, PortableArena("off")), states=state
    )
    level = open_level(scene, tmp_path)
    entry = scene.put(level, ids(1, 2000), **(dict(states=states) if states else {}))
    most = 0
    while level.busy():
        level.poll()
        [*jobs] = level._jobs
        for job in jobs:
            windows = [*job.source._under_way, *job.source._ready]
            most = max(most, sum(rows.nbytes for window in windows for rows in window.rows))
    assert 0 < most <= 8 * LAYOUT.nbytes
    assert whole(scene, level, entry)
    level.close()
    assert scene.used == 0


@pytest.mark.parametrize("wait", ["settle", "flush", "close"])
def test_who_waits_for_one_level_copies_from_the_device_for_those_before_it(tmp_path: Path, wait: str) -> None:
    scene = Scene.build([LAYOUT], lambda layout: ShadowBackend(seed=1).page_store(layout, 8, PortableArena("off")))
    shop = Workshop()
    archive = DiskArchive(
        tmp_path / "archive", scene.identity, shape_of(scene), ArchiveOptions("state", 64 << 20), shop
    )
    roots = open_level(scene, tmp_path / "roots", name="system-prompt", rank=40, workshop=shop)
    cold = open_level(scene, tmp_path / "cold", workshop=shop)
    going = scene.put(roots, ids(1, 500))
    archive.take(going, "superseded", roots)
    roots.remove(going)
    scene.put(roots, ids(2, 500))
    scene.put(cold, ids(3, 500))
    waiting = threading.Thread(target=getattr(cold, wait), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive(), "the writer waits for pages that nobody copies"
    for member in (roots, archive, *([cold] if wait != "close" else [])):
        member.close()
    assert scene.used == 0


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_entries_start_and_are_checked_quickly(tmp_path: Path, count: int) -> None:
    scene = new_scene()
    level = open_level(scene, tmp_path)
    scene.put(level, ids(1, 9))
    drain(level)
    level.close()
    write_entries(scene, tmp_path, count - 1)
    gc.collect()
    # Time of the processor, as others may be using the machine; the files were just written and are in the page cache.
    start = time.process_time()
    level = open_level(scene, tmp_path, max_bytes=1 << 30)
    started = time.process_time() - start
    assert level.usage().entries == count
    some = list(level.entries())[:: count // 20]
    assert all(whole(scene, level, entry) for entry in some)
    level.close()
    start = time.process_time()
    report = check(tmp_path)
    checked = time.process_time() - start
    assert (report.conversations, report.damaged) == (count, [])
    assert started <= 3e-4 * count, started
    assert checked <= 1e-3 * count, checked


def write_entries(scene: Scene, root: Path, count: int) -> None:
    """Entries without a level: its queue and its syncs would take most of the test's time."""
    from strata_tiers import segment
    from strata_tiers.layout import manifest_name

    files, shape = Files(), shape_of(scene)
    holdings = Holdings(shape, Limits(), scene.identity.parts)
    for number in range(count):
        entry = scene.entry(np.append(np.array([number], np.int32), ids(number, 8)))
        blocks = scene.blocks(entry)
        pieces = holdings.plan(entry)
        for piece in pieces:
            fd = files.create(root / "segments" / piece.name)
            for _ in segment.write(files, fd, piece, entry, shape, blocks.__getitem__):
                pass
            files.close(fd)
        data = manifest.encode(entry, scene.identity.parts, pieces, shape.page_tokens)
        (root / "conversations" / manifest_name(entry.id)).write_bytes(data)


def test_a_change_of_use_is_written_once_for_many_and_survives(tmp_path: Path) -> None:
    scene = new_scene()
    level = open_level(scene, tmp_path)
    entry = scene.put(level, ids(1, 9))
    drain(level)
    before = level.usage()
    for number in range(50):
        level.update(attrs.evolve(entry, used=float(number), pinned=number % 2 == 1))
    assert level.usage() == before
    level.close()
    level = open_level(scene, tmp_path)
    [found] = level.entries()
    assert (found.used, found.pinned) == (49.0, True)
    assert level.usage() == before
    level.close()
