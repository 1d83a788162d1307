"""Files that are not what was written: nothing of them is ever served, and what is sound is not lost with it."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import attrs
import numpy as np
import pytest
from disk_kit import drain, files_in, ids, new_scene, open_level, whole
from faulty_files import FaultyFiles
from strata_tiers.check import check
from strata_tiers.layout import checksum
from strata_tiers.level import DiskLevel, Workshop

from strata_core.conversations.identity import Identity
from strata_core.errors import DamagedEntry, LevelError
from strata_core.store.base import Entry
from strata_core.testing.scene import Scene


@pytest.fixture
def scene() -> Scene:
    return new_scene()


def store(scene: Scene, root: Path, count: int = 22, seed: int = 1) -> Entry:
    """An entry on a level that is closed again: segments [0, 8), [8, 20), [20, 22)."""
    level = open_level(scene, root)
    entry = scene.put(level, ids(seed, count), turns=(0, 9))
    drain(level)
    level.close()
    return entry


def segments(root: Path) -> list[Path]:
    """In the order of their positions."""
    return sorted((root / "segments").iterdir(), key=lambda path: int(path.name.split("-")[3].split(".")[0]))


def served(scene: Scene, level: DiskLevel, entry: Entry) -> int:
    """How many positions come back, all as they were put; damage is met on the way."""
    for _ in range(5):
        found = level.find(scene.query(entry.tokens))
        if not found:
            return 0
        shared = found[0][1]
        try:
            pages = scene.restore(level, found[0][0], shared)
        except DamagedEntry as error:
            assert error.good_tokens < shared
            continue
        assert scene.holds(pages, entry)
        pages.release()
        return shared
    raise AssertionError("offered again and again")


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flip_of_any_byte_is_found_by_a_check(scene: Scene, tmp_path: Path, step: int) -> None:
    store(scene, tmp_path, 5)
    for path in files_in(tmp_path):
        data = path.read_bytes()
        for at in range(0, len(data), step):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            report = check(tmp_path)
            assert not report.sound or report.unknown, (path.name, at)
        path.write_bytes(data)
    assert check(tmp_path).sound


@pytest.mark.parametrize("step", [151, pytest.param(3, marks=pytest.mark.slow)])
def test_a_flip_of_any_byte_is_never_served(scene: Scene, tmp_path: Path, step: int) -> None:
    entry = store(scene, tmp_path, 5)
    originals = {path: path.read_bytes() for path in files_in(tmp_path)}
    for path, data in originals.items():
        for at in range(0, len(data), step):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            level = open_level(scene, tmp_path)
            assert served(scene, level, entry) < 5, (path.name, at)
            level.close()
            for stray in (tmp_path / "quarantine").iterdir():
                stray.unlink()
            for name, content in originals.items():
                name.write_bytes(content)
    assert scene.used == 0


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("how", ["flip", "short", "long", "empty", "missing", "link", "fifo", "folder", "other"])
def test_a_bad_segment_costs_what_follows_it_and_nothing_else(
    scene: Scene, tmp_path: Path, number: int, how: str
) -> None:
    root = tmp_path / "level"
    entry, other = store(scene, root), store(scene, root, 9, seed=2)
    level = open_level(scene, root)
    path = level.place.segment_path(level.place.holdings.kept[entry.id].parts[number])
    level.close()
    spoil(path, how, tmp_path)
    level = open_level(scene, root)
    before = level.usage().bytes
    assert served(scene, level, entry) == (0, 8, 20)[number]
    assert whole(scene, level, other)
    assert level.usage().bytes <= before
    drain(level)
    level.close()
    level = open_level(scene, root)
    assert served(scene, level, entry) == (0, 8, 20)[number]
    # What a start sees it leaves alone; what a restore met was put in order.
    assert level.report.stale == (how not in ("flip", "other"))
    level.close()
    assert (tmp_path / "outside").exists() == (how == "link")


def spoil(path: Path, how: str, elsewhere: Path) -> None:
    data = path.read_bytes()
    if how == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    elif how == "short":
        path.write_bytes(data[:-1])
    elif how == "long":
        path.write_bytes(data + b"\0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other":
        path.write_bytes(np.random.default_rng(0).bytes(len(data)))
    else:
        path.unlink()
        if how == "link":
            (elsewhere / "outside").write_bytes(data)  # even with the right content
            path.symlink_to(elsewhere / "outside")
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()


@pytest.mark.parametrize("how", ["flip", "short", "long", "empty", "link", "fifo", "other"])
def test_a_bad_manifest_is_counted_kept_and_not_used(scene: Scene, tmp_path: Path, how: str) -> None:
    root = tmp_path / "level"
    entry, other = store(scene, root), store(scene, root, 9, seed=2)
    path = root / "conversations" / f"strata-conv-{entry.id}.meta"
    spoil(path, how, tmp_path)
    level = open_level(scene, root)
    assert level.report.stale == 1
    assert level.report.conversations == 1
    assert path.exists()
    assert served(scene, level, entry) == 0
    assert whole(scene, level, other)
    assert level.usage().bytes > level.weigh([other])
    level.close()


def test_a_hard_link_is_as_good_as_the_file(scene: Scene, tmp_path: Path) -> None:
    root = tmp_path / "level"
    entry = store(scene, root)
    outside = tmp_path / "outside"
    os.link(segments(root)[0], outside)
    os.link(root / "conversations" / f"strata-conv-{entry.id}.meta", root / "conversations" / "strata-conv-other.meta")
    before = outside.read_bytes()
    level = open_level(scene, root)
    assert level.report.stale == 1  # the name is not that of the id
    assert whole(scene, level, entry)
    level.update(attrs.evolve(next(iter(level.entries())), used=3.0))
    level.remove(entry)
    level.close()
    assert outside.read_bytes() == before


def test_other_identities_are_kept_reported_and_counted(scene: Scene, tmp_path: Path) -> None:
    entry = store(scene, tmp_path)
    files = files_in(tmp_path)
    other = Scene(scene.pools, Identity.of({"weights": "others", "kv": "int8"}))
    level = open_level(other, tmp_path)
    assert (level.report.foreign, level.report.conversations, level.report.orphans) == (1, 0, 0)
    assert level.usage().bytes > sum(path.stat().st_size for path in files)
    assert level.find(other.query(entry.tokens)) == []
    with pytest.raises(LevelError, match="another's"):
        other.put(level, entry.tokens)
    mine = other.put(level, entry.tokens, turns=(0, 9))
    drain(level)
    level.reclaim(1 << 40)
    assert whole(other, level, mine)
    level.close()
    assert set(files) <= set(files_in(tmp_path))
    level = open_level(scene, tmp_path)
    assert whole(scene, level, entry)
    assert level.report.foreign == 1
    level.close()


def test_unknown_versions_are_kept_with_all_segments_that_they_may_name(scene: Scene, tmp_path: Path) -> None:
    entry = store(scene, tmp_path)
    path = tmp_path / "conversations" / f"strata-conv-{entry.id}.meta"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    data[16:32] = checksum(bytes(data[:16]), bytes(data[32:]))
    path.write_bytes(data)
    level = open_level(scene, tmp_path)
    before = files_in(tmp_path)
    assert level.report.foreign == 1
    assert served(scene, level, entry) == 0
    level.reclaim(1 << 40)
    level.close()
    assert check(tmp_path, repair=True).unknown == 1
    assert files_in(tmp_path) == before
    assert path.read_bytes() == data


def test_a_start_deletes_nothing_and_what_it_counted_goes_when_room_is_asked_for(scene: Scene, tmp_path: Path) -> None:
    entry = store(scene, tmp_path)
    (tmp_path / "segments" / ".strata-tmp-0011").write_bytes(b"x" * 5000)
    orphan = "strata-seg-" + "0" * 32 + "-0.seg"
    (tmp_path / "segments" / orphan).write_bytes(b"y" * 100)
    (tmp_path / "notes.txt").write_bytes(b"mine")
    before = files_in(tmp_path)
    level = open_level(scene, tmp_path)
    assert files_in(tmp_path) == before
    assert (level.report.leftovers, level.report.orphans) == (1, 1)
    held = level.usage().bytes
    level.reclaim(1)
    assert level.usage().bytes == held - 8192 - 128
    level.reclaim(1 << 40)
    level.close()
    assert set(before) - set(files_in(tmp_path)) == {
        tmp_path / "segments" / ".strata-tmp-0011",
        tmp_path / "segments" / orphan,
    }
    level = open_level(scene, tmp_path)
    assert whole(scene, level, entry)
    level.close()


def test_a_damaged_segment_is_healed_from_the_other_level(scene: Scene, tmp_path: Path) -> None:
    shop = Workshop()
    warm = open_level(scene, tmp_path / "warm", workshop=shop, name="warm", rank=10)
    cold = open_level(scene, tmp_path / "cold", workshop=shop)
    entry = scene.put(warm, ids(1, 20), turns=(0, 9))
    below = scene.put(cold, ids(1, 20), turns=(0, 9))
    drain(warm)
    drain(cold)
    for part in warm.place.holdings.kept[entry.id].parts:
        path = warm.place.segment_path(part)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert whole(scene, warm, entry)
    assert warm.restorer.counts == {"healed": 2, "quarantined": 2}
    assert whole(scene, cold, below)
    assert len(list((tmp_path / "warm" / "quarantine").iterdir())) == 2
    warm.close()
    again = open_level(scene, tmp_path / "warm", name="warm", rank=10)
    assert whole(scene, again, entry)
    assert again.report.quarantined == 2
    again.close()
    cold.close()


def test_every_entry_that_uses_a_damaged_segment_is_cut_and_it_is_written_anew_by_the_next(
    scene: Scene, tmp_path: Path
) -> None:
    level = open_level(scene, tmp_path)
    system = ids(1, 12)
    entries = [scene.put(level, np.append(system, ids(seed, 9)), turns=(0, 12)) for seed in (2, 3)]
    drain(level)
    shared = level.place.holdings.kept[entries[0].id].parts[0]
    assert len(shared.users) == 2
    spoil(level.place.segment_path(shared), "flip", tmp_path)
    with pytest.raises(DamagedEntry):
        whole(scene, level, entries[0])
    assert list(level.entries()) == []
    fresh = scene.put(level, np.append(system, ids(4, 9)), turns=(0, 12))
    drain(level)
    assert whole(scene, level, fresh)
    level.close()
    level = open_level(scene, tmp_path)
    assert [entry.id for entry in level.entries()] == [fresh.id]
    assert whole(scene, level, fresh)
    level.close()


def test_bytes_that_cannot_be_read_are_damage_but_a_lack_of_handles_is_not(scene: Scene, tmp_path: Path) -> None:
    entry = store(scene, tmp_path)
    code = [0]
    files = FaultyFiles(lambda number, name, arguments: code[0] if name == "open" else 0)
    level = open_level(scene, tmp_path, files=files)
    code[0] = errno.EMFILE
    with pytest.raises(LevelError) as caught:
        whole(scene, level, entry)
    assert not isinstance(caught.value, DamagedEntry)
    code[0] = 0
    assert whole(scene, level, entry)
    code[0] = errno.EIO
    with pytest.raises(DamagedEntry):
        whole(scene, level, entry)
    assert level.find(scene.query(entry.tokens)) == []
    level.close()
    assert scene.used == 0


def test_a_clock_that_went_back_makes_nothing_expire(scene: Scene, tmp_path: Path) -> None:
    level = open_level(scene, tmp_path, max_age_s=100.0)
    old = scene.put(level, ids(1, 5), used=1000.0)
    kept = scene.put(level, ids(2, 5), used=1000.0, pinned=True)
    new = scene.put(level, ids(3, 5), used=1090.0)
    assert [entry.id for entry in level.expired(1150.0)] == [old.id]
    assert [entry.id for entry in level.expired(1200.0)] == [old.id, new.id]
    assert level.expired(900.0) == []
    drain(level)
    level.close()
    level = open_level(scene, tmp_path, max_age_s=100.0)
    assert [entry.id for entry in level.expired(1150.0)] == [old.id]
    assert level.holds(kept.id)
    level.close()


@pytest.mark.parametrize("states", [False, True])
def test_without_the_states_that_a_model_needs_nothing_is_offered(tmp_path: Path, states: bool) -> None:
    with_them = dict(states=(8, 22)) if states else {}
    scene, other = new_scene(states=states), new_scene(states=not states)
    level = open_level(scene, tmp_path)
    entry = scene.put(level, ids(1, 22), turns=(0, 9), **with_them)
    drain(level)
    level.close()
    level = open_level(other, tmp_path)
    assert not level.find(other.query(ids(1, 30)))
    assert (level.report.conversations, level.report.foreign) == (0, 1)
    level.close()
    level = open_level(scene, tmp_path)
    assert whole(scene, level, entry)
    level.close()
