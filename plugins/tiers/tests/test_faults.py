"""Disks that fail: no request is harmed, nothing torn is offered, counters tell, and the level recovers."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from disk_kit import drain, du, files_in, ids, new_scene, open_level, whole
from faulty_files import FaultyFiles, PowerFiles
from strata_tiers.check import check
from strata_tiers.files import Files

from strata_core.errors import LevelError

PARK = 24  # positions of what is parked: six pages


def _count_calls(tmp_path: Path) -> int:
    """How many calls a park takes on a folder that holds something already."""
    scene = new_scene()
    files = FaultyFiles(lambda number, name, arguments: 0)
    level = open_level(scene, tmp_path / "count", files=files)
    scene.put(level, ids(1, PARK), turns=(0, 9))
    drain(level)
    before = len(files.calls)
    scene.put(level, ids(2, PARK), turns=(0, 9))
    drain(level)
    level.close()
    return len(files.calls) - before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_failure_at_any_call_of_a_park_hands_the_pages_back_and_tears_nothing(tmp_path: Path, code: int) -> None:
    for failing in range(_count_calls(tmp_path)):
        scene, root = new_scene(), tmp_path / f"{failing}"
        armed: list[int] = []
        files = FaultyFiles(lambda number, name, arguments, a=armed, f=failing: code if a and number - a[0] == f else 0)
        level = open_level(scene, root, files=files)
        first = scene.put(level, ids(1, PARK), turns=(0, 9))
        drain(level)
        empty = level.usage()
        armed.append(len(files.calls))
        second = scene.put(level, ids(2, PARK), turns=(0, 9))
        [outcome] = drain(level)
        name = files.calls[armed[0] + failing] if armed[0] + failing < len(files.calls) else "none"
        armed.clear()
        if outcome.kind == "failed":
            assert outcome.error
            assert outcome.pages is not None, name
            assert scene.holds(outcome.pages, second), name
            outcome.pages.release()
            assert level.usage() == empty, name
            assert not level.holds(second.id)
            again = scene.put(level, ids(2, PARK), turns=(0, 9))  # the disk works again
            assert [o.kind for o in drain(level)] == ["stored"], name
            second = again
        assert whole(scene, level, first), name
        assert whole(scene, level, second), name
        level.close()
        report = check(root)
        assert report.sound, (name, report.damaged)
        reopened = open_level(scene, root)
        assert {entry.id for entry in reopened.entries()} == {first.id, second.id}
        reopened.close()
        assert scene.used == 0
        shutil.rmtree(root)


def test_a_volume_that_is_full_costs_no_request_and_the_level_recovers(tmp_path: Path) -> None:
    full = [True]
    files = FaultyFiles(lambda number, name, arguments: errno.ENOSPC if full[0] and name in ("write", "reserve") else 0)
    scene = new_scene()
    level = open_level(scene, tmp_path, files=files)
    for seed in range(5):
        entry = scene.put(level, ids(seed, 30))
        assert whole(scene, level, entry)
        [outcome] = drain(level)
        assert (outcome.kind, outcome.error) == ("failed", os.strerror(errno.ENOSPC))
        assert outcome.pages is not None
        outcome.pages.release()
    assert level.usage().bytes == 0
    assert files_in(tmp_path) == []
    full[0] = False
    entry = scene.put(level, ids(9, 30))
    assert [outcome.kind for outcome in drain(level)] == ["stored"]
    assert whole(scene, level, entry)
    level.close()


def test_the_folder_may_be_deleted_while_the_level_runs(tmp_path: Path) -> None:
    scene, root = new_scene(), tmp_path / "level"
    level = open_level(scene, root)
    lost = scene.put(level, ids(1, 40), turns=(0, 16))
    drain(level)
    shutil.rmtree(root)
    shares = scene.put(level, np.append(ids(1, 20), ids(5, 10)), turns=(0, 16))  # its first segment was deleted too
    assert [outcome.kind for outcome in drain(level)] == ["stored"]
    assert whole(scene, level, shares)
    with pytest.raises(LevelError):
        whole(scene, level, lost)
    level.close()
    assert check(root).sound
    reopened = open_level(scene, root)
    # What the two share was written again, so that much is left of the first.
    assert {entry.id: len(entry.tokens) for entry in reopened.entries()} == {shares.id: 30, lost.id: 16}
    reopened.close()
    assert scene.used == 0


@pytest.mark.parametrize("name", ["segments", "conversations", "quarantine"])
def test_nothing_is_written_through_a_link_that_takes_a_folders_place_while_the_level_runs(
    tmp_path: Path, name: str
) -> None:
    scene, root, elsewhere = new_scene(), tmp_path / "level", tmp_path / "elsewhere"
    level = open_level(scene, root)
    scene.put(level, ids(1, 20))
    drain(level)
    (root / name).rename(elsewhere)
    (root / name).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    entry = scene.put(level, ids(2, 20))
    [outcome] = drain(level)
    assert outcome.kind == "failed"
    assert "symbolic link" in outcome.error
    assert outcome.pages is not None
    outcome.pages.release()
    assert not level.holds(entry.id)
    assert sorted(elsewhere.iterdir()) == before
    (root / name).unlink()
    elsewhere.rename(root / name)
    scene.put(level, ids(2, 20))
    assert [o.kind for o in drain(level)] == ["stored"]
    level.close()
    assert scene.used == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LevelError, match="cannot be used"):
        open_level(new_scene(), tmp_path / "level")
    tmp_path.chmod(0o700)


def test_a_second_process_gets_a_clear_error_with_the_pid_of_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from disk_kit import *\nlevel = open_level(new_scene(), Path(sys.argv[1]))\nprint('open', flush=True); input()"
    )
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(here), str(here.parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(LevelError, match=rf"in use by another process \(pid {child.pid}\)"):
        open_level(new_scene(), tmp_path)
    assert check(tmp_path).sound  # reading only is possible
    with pytest.raises(LevelError, match="in use"):
        check(tmp_path, repair=True)
    child.kill()
    child.communicate()
    open_level(new_scene(), tmp_path).close()  # the lock went with the process


def test_no_power_cut_loses_what_was_reported_or_shows_what_is_damaged(tmp_path: Path) -> None:
    scene, root = new_scene(), tmp_path / "level"
    files = PowerFiles(root)
    level = open_level(scene, root, files=files)
    entries: dict[str, Any] = {}

    def settle() -> None:
        for outcome in drain(level):
            files.note("stored", outcome.entry.id)

    def put(*args: Any, **fields: Any) -> Any:
        entry = scene.put(level, *args, **fields)
        entries[entry.id] = entry
        return entry

    def remove(entry: Any) -> None:
        files.note("removed", entry.id)
        level.remove(entry)

    old = put(ids(1, 22), turns=(0, 9), conversation="one")
    settle()
    put(np.append(ids(1, 12), ids(2, 9)), turns=(0, 9))
    put(ids(3, 6))
    settle()
    put(ids(1, 31), turns=(0, 9, 23), conversation="one")
    settle()
    remove(old)
    level.update(attrs.evolve(next(iter(level.entries())), used=7.0))
    put(ids(4, 17))
    settle()
    level.close()
    random = np.random.default_rng(0)
    for cut in range(len(files.log) + 1):
        for attempt in range(3):
            image = tmp_path / "image"
            notes = files.after_cut(cut, image, random)
            image.mkdir(exist_ok=True)
            after = open_level(scene, image)
            found = {entry.id for entry in after.entries()}
            stored = {entry_id for kind, entry_id in notes if kind == "stored"}
            removed = {entry_id for kind, entry_id in notes if kind == "removed"}
            assert stored - removed <= found, (cut, attempt, files.log[cut - 1][:3])
            for entry in after.entries():
                assert len(entry.tokens) == len(entries[entry.id].tokens) or entry.id in removed
                assert whole(scene, after, entry)
            after.close()
            shutil.rmtree(image)
    assert scene.used == 0


def test_du_of_the_folder_never_exceeds_the_budget(tmp_path: Path) -> None:
    scene, root, bound = new_scene(), tmp_path / "level", 600 << 10
    level = open_level(scene, root, max_bytes=bound)
    held: list[Any] = []
    for seed in range(40):
        entry = scene.entry(ids(seed, 1 + 37 * seed % 900))
        while level.usage().bytes + level.cost(entry) > bound:
            level.remove(held.pop(0))
        pages = scene.pages(entry)
        level.put(entry, pages)
        pages.release()
        held.append(entry)
        if seed % 7 == 3:
            drain(level)
            assert du(root) <= bound
    drain(level)
    assert du(root) <= bound
    level.close()
    reopened = open_level(scene, root, max_bytes=bound)
    assert reopened.usage().bytes >= du(root) - (32 << 10)
    assert {entry.id for entry in reopened.entries()} == {entry.id for entry in held}
    reopened.close()


def test_what_is_deleted_while_its_manifest_is_written_is_not_reported_as_missing(tmp_path: Path) -> None:
    scene, reached, go_on = new_scene(), threading.Event(), threading.Event()
    go_on.set()

    class Slow(Files):
        def create(self, path: Path) -> int:
            reached.set()
            assert go_on.wait(10)
            return super().create(path)

    level = open_level(scene, tmp_path, files=Slow())
    entry = scene.put(level, ids(1, 20))
    drain(level)
    reached.clear()
    go_on.clear()
    level.update(attrs.evolve(entry, used=9.0))
    assert reached.wait(10)
    level.remove(entry)
    go_on.set()
    level.flush()
    level.close()
    assert check(tmp_path).conversations == 0
