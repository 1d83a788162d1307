"""How the reads of a restore are shared among threads, and in how much memory they go to a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_kit import drain, ids, open_level
from strata_tiers.files import Files
from strata_tiers.layout import page_digest
from strata_tiers.reader import ALONE_BYTES, Read, Reader

from strata_core.memory.arena import PortableArena
from strata_core.pool import sink as sinks
from strata_core.pool.layout import PageLayout
from strata_core.pool.sink import PageSink
from strata_core.testing.scene import Scene
from strata_core.testing.shadow import ShadowBackend

BLOCK = 64 << 10


class Watched(Files):
    """Notes which thread reads what, and answers whether a file is cached as it was told to."""

    def __init__(self, cached: Callable[[int], bool]):
        super().__init__()
        self.told = cached
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def cached(self, fd: int, offset: int) -> bool:
        return self.told(fd)

    def read(self, fd: int, buffers: Any, offset: int) -> None:
        self.seen.setdefault(fd, []).append((threading.get_ident(), offset))
        time.sleep(0.001)  # so that the other thread gets its turn
        super().read(fd, buffers, offset)


def reads(files: Files, folder: Path, count: int, blocks: int) -> list[Read]:
    """Reads of so many files of random blocks."""
    found = []
    for number in range(count):
        data = np.random.default_rng(number).integers(0, 256, (blocks, BLOCK), np.uint8)
        path = folder / f"file{number}"
        path.write_bytes(data.tobytes())
        fd = files.open(path)
        found += [Read(fd, n * BLOCK, (np.zeros(BLOCK, np.uint8),), (page_digest(data[n]),)) for n in range(blocks)]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_that_comes_from_the_disk_is_read_by_one_thread_in_order(tmp_path: Path, count: int) -> None:
    files = Watched(lambda fd: False)
    work = reads(files, tmp_path, count, ALONE_BYTES // BLOCK)
    reader = Reader(files)
    assert reader.fill(work) is None
    assert len(files.seen) == count
    for seen in files.seen.values():
        assert len({thread for thread, _ in seen}) == 1
        assert [offset for _, offset in seen] == sorted(offset for _, offset in seen)
    assert len({seen[0][0] for seen in files.seen.values()}) == min(count, 2)
    reader.close()


def test_a_cached_file_is_shared_by_the_threads(tmp_path: Path) -> None:
    files = Watched(lambda fd: True)
    work = reads(files, tmp_path, 1, 2 * ALONE_BYTES // BLOCK)
    reader = Reader(files)
    assert reader.fill(work) is None
    [seen] = files.seen.values()
    assert len({thread for thread, _ in seen}) == 2
    assert sorted(offset for _, offset in seen) == [read.offset for read in work]
    reader.close()


@pytest.mark.parametrize("cached", [True, False])
def test_the_first_page_that_is_not_what_was_written_is_named(tmp_path: Path, cached: bool) -> None:
    files = Watched(lambda fd: cached)
    work = reads(files, tmp_path, 2, ALONE_BYTES // BLOCK)
    for number in (9, 20):
        work[number] = Read(work[number].fd, work[number].offset, work[number].buffers, (bytes(16),))
    reader = Reader(files)
    assert reader.fill(work) == (9, "a page is not what was written")
    reader.close()


def test_the_system_tells_what_is_cached(tmp_path: Path) -> None:
    files = Files()
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    fd = files.open(path)
    assert files.cached(fd, (1 << 20) - 1)
    files.close(fd)


@pytest.mark.parametrize("aside", [True, False])
@pytest.mark.parametrize("tokens, states", [(3000, ()), (256, (32, 64, 96, 128, 256)), (500, (500,))])
def test_a_restore_to_a_device_takes_no_more_memory_than_its_staging_area(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool, tokens: int, states: tuple[int, ...]
) -> None:
    """A state is larger than the area, and is alone in it."""
    layout = PageLayout.attention(layers=2, kv_heads=2, head_dim=64, kv_type="f16", page_tokens=32)
    monkeypatch.setattr(sinks, "STAGING_BYTES", 8 * layout.nbytes)
    state = PageLayout.state([("delta", 2, 5 * layout.nbytes)]) if states else None
    most = max(8 * layout.nbytes, state.nbytes if state else 0)
    scene = Scene.build(
        [layout], lambda one: ShadowBackend(seed=1).page_store(one, 8, PortableArena("off")), states=state
    )
    level = open_level(scene, tmp_path)
    entry = scene.put(level, ids(1, tokens), **(dict(states=states) if states else {}))
    drain(level)
    sink = PageSink(scene.pools, tokens, (scene.state_pool, states) if scene.state_pool is not None else None)
    hand_out = sink.buffers

    def watched(block: int) -> tuple[np.ndarray, ...]:
        buffers = hand_out(block)
        assert sink._staging() <= most
        return buffers

    monkeypatch.setattr(sink, "buffers", watched)
    if aside:
        thread = threading.Thread(target=level.load, args=(entry, tokens, sink), daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while thread.is_alive():
            assert time.monotonic() < end, "the reader waits for what it has not filled itself"
            sink.pump()
            time.sleep(0.001)
    else:
        level.load(entry, tokens, sink)
    pages = sink.finish()
    assert scene.holds(pages, entry)
    pages.release()
    level.close()
    assert scene.used == 0
