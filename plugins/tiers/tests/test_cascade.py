"""Entries move from the warm to the cold level: all of one or nothing, and never gone from both."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from disk_kit import drain, du, ids, new_scene, open_level, whole
from faulty_files import FaultyFiles, PowerFiles
from strata_tiers.check import check
from strata_tiers.files import Files
from strata_tiers.level import DiskLevel, Workshop
from strata_tiers.writer import Writer

from strata_core.errors import LevelError
from strata_core.store.ram import RamLevel
from strata_core.testing.scene import Scene


@pytest.fixture
def scene() -> Scene:
    return new_scene()


class OtherVolume(Files):
    """Hard links do not reach from one level to the other."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def two_levels(scene: Scene, root: Path, files: Files | None = None, **options: object) -> tuple[DiskLevel, DiskLevel]:
    shop = Workshop(Writer(files))
    warm = open_level(scene, root / "warm", workshop=shop, name="warm", rank=10, **options)
    return warm, open_level(scene, root / "cold", workshop=shop)


def close(*levels: DiskLevel) -> None:
    for level in levels:
        level.close()


@pytest.mark.parametrize("files", [Files, OtherVolume])
def test_an_entry_is_adopted_and_keeps_its_age_and_contents(scene: Scene, tmp_path: Path, files: type[Files]) -> None:
    warm, cold = two_levels(scene, tmp_path, files())
    system = ids(1, 12)
    moved, stays = (scene.put(warm, np.append(system, ids(s, 10)), turns=(0, 12), used=5.0) for s in (2, 3))
    drain(warm)
    warm.set_leaving(moved, True)
    cold.adopt(moved, warm)
    assert whole(scene, cold, moved)  # at once
    assert warm.holds(moved.id)
    [outcome] = drain(cold)
    assert (outcome.kind, outcome.entry.used) == ("adopted", 5.0)
    warm.remove(moved)
    assert whole(scene, cold, moved)
    assert whole(scene, warm, stays)
    assert warm.usage().bytes == warm.weigh([stays])
    close(warm, cold)
    warm, cold = two_levels(scene, tmp_path)
    assert [entry.used for entry in cold.entries()] == [5.0]
    assert whole(scene, cold, moved)
    assert whole(scene, warm, stays)
    close(warm, cold)
    assert scene.used == 0


def test_an_entry_may_be_adopted_while_it_is_still_being_written(scene: Scene, tmp_path: Path) -> None:
    warm, cold = two_levels(scene, tmp_path)
    entry = scene.put(warm, ids(1, 30))
    cold.adopt(entry, warm)
    assert whole(scene, cold, entry)
    cold.flush()
    warm.flush()
    assert [outcome.kind for outcome in (*warm.poll(), *cold.poll())] == ["stored", "adopted"]
    warm.remove(entry)
    assert whole(scene, cold, entry)
    close(warm, cold)


@pytest.mark.parametrize("files", [Files, OtherVolume])
@pytest.mark.parametrize("known", [10, 22, 31, 38])
def test_what_is_cut_elsewhere_above_is_adopted_too(
    scene: Scene, tmp_path: Path, files: type[Files], known: int
) -> None:
    """The level below has an older state of the conversation, the level above never had it."""
    warm, cold = two_levels(scene, tmp_path, files())
    older = scene.put(cold, ids(1, known), turns=(0, 9))
    newer = scene.put(warm, ids(1, 43), turns=(0, 9, 30))
    drain(warm)
    drain(cold)
    cold.adopt(newer, warm)
    [outcome] = drain(cold)
    assert (outcome.kind, outcome.error) == ("adopted", "")
    warm.remove(newer)
    assert whole(scene, cold, newer)
    assert whole(scene, cold, older)
    close(warm, cold)
    assert check(tmp_path / "cold").sound
    assert scene.used == 0


def test_damage_met_while_it_is_put_together_is_not_passed_on(scene: Scene, tmp_path: Path) -> None:
    warm, cold = two_levels(scene, tmp_path)
    scene.put(cold, ids(1, 22), turns=(0, 9))
    newer = scene.put(warm, ids(1, 43), turns=(0, 9, 30))
    drain(warm)
    drain(cold)
    path = warm.place.segment_path(warm.place.holdings.kept[newer.id].parts[1])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    cold.adopt(newer, warm)
    [outcome] = drain(cold)
    assert outcome.kind == "failed"
    assert not cold.holds(newer.id)
    [left] = warm.entries()
    assert (left.id, len(left.tokens)) == (newer.id, 8)
    close(warm, cold)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_after_any_failure_an_entry_is_where_it_was(scene: Scene, tmp_path: Path, code: int) -> None:
    for failing in range(60):
        armed: list[int] = []
        files = FaultyFiles(lambda number, name, arguments, a=armed, f=failing: code if a and number - a[0] == f else 0)
        root = tmp_path / str(failing)
        warm, cold = two_levels(scene, root, files)
        entry = scene.put(warm, ids(1, 22), turns=(0, 9))
        drain(warm)
        armed.append(len(files.calls))
        warm.set_leaving(entry, True)
        cold.adopt(entry, warm)
        [outcome] = drain(cold)
        done = len(files.calls) - armed[0] <= failing
        armed.clear()
        if outcome.kind == "failed":
            warm.set_leaving(entry, False)
            assert not cold.holds(entry.id)
            assert cold.usage().bytes == 0
            assert whole(scene, warm, entry)
        else:
            warm.remove(entry)
            assert whole(scene, cold, entry)
        close(warm, cold)
        if done:
            return
    raise AssertionError("an adoption takes too many calls")


def test_what_is_leaving_weighs_nothing_and_its_room_is_waited_for(scene: Scene, tmp_path: Path) -> None:
    probe, _ = two_levels(scene, tmp_path / "probe")
    bound = probe.weigh([scene.entry(ids(1, 900))]) + 4096
    close(probe, _)
    warm, cold = two_levels(scene, tmp_path, max_bytes=bound)
    old = scene.put(warm, ids(1, 900))
    drain(warm)
    warm.set_leaving(old, True)
    assert warm.usage().bytes == 0
    cold.adopt(old, warm)
    new = scene.put(warm, ids(2, 900))
    assert whole(scene, warm, new)
    while cold.busy():
        for outcome in cold.poll():
            assert outcome.kind == "adopted"
            assert not warm.poll()  # there is no room yet
            warm.remove(old)
    drain(warm)
    assert du(tmp_path / "warm") <= bound
    assert whole(scene, warm, new)
    assert whole(scene, cold, old)
    close(warm, cold)


def test_damage_met_on_the_way_down_is_not_passed_on(scene: Scene, tmp_path: Path) -> None:
    warm, cold = two_levels(scene, tmp_path, OtherVolume())
    entry = scene.put(warm, ids(1, 22), turns=(0, 9))
    drain(warm)
    path = warm.place.segment_path(warm.place.holdings.kept[entry.id].parts[1])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    cold.adopt(entry, warm)
    [outcome] = drain(cold)
    assert outcome.kind == "failed"
    assert not cold.holds(entry.id)
    [left] = warm.entries()
    assert (left.id, len(left.tokens)) == (entry.id, 8)
    assert whole(scene, warm, left)
    close(warm, cold)


def test_a_level_of_another_kind_cannot_be_adopted_from(scene: Scene, tmp_path: Path) -> None:
    level = open_level(scene, tmp_path)
    ram = RamLevel(scene.pools, copies=False, max_bytes=1 << 20, max_entries=5)
    entry = scene.put(ram, ids(1, 5))
    with pytest.raises(LevelError, match="cannot take entries over"):
        level.adopt(entry, ram)
    ram.close()
    level.close()


def test_no_power_cut_on_the_way_down_loses_the_entry(scene: Scene, tmp_path: Path) -> None:
    import shutil

    files = PowerFiles(tmp_path / "levels")
    warm, cold = two_levels(scene, tmp_path / "levels", files)
    entry = scene.put(warm, ids(1, 22), turns=(0, 9))
    drain(warm)
    files.note("stored")
    cold.adopt(entry, warm)
    drain(cold)
    warm.remove(entry)
    close(warm, cold)
    random = np.random.default_rng(0)
    first = files.log.index(("note", "stored"))
    for cut in range(first + 1, len(files.log) + 1):
        for _ in range(4):
            image = tmp_path / "image"
            files.after_cut(cut, image, random)
            after = two_levels(scene, image)
            assert any(level.holds(entry.id) and whole(scene, level, entry) for level in after)
            close(*after)
            shutil.rmtree(image)
