"""Segments of one entry that are written at the same time."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_kit import SMALL, drain, files_in, ids, new_scene, open_level, whole
from faulty_files import FaultyFiles
from strata_tiers import jobs
from strata_tiers.check import check

TURNS = (0, 16, 32)  # three segments


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SIDE_BY_SIDE_BYTES", 0)


@pytest.mark.parametrize("states", [False, True])
def test_the_files_are_those_that_are_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: bool
) -> None:
    scene, found = new_scene(states=states), []
    for least in (1 << 60, 0):
        monkeypatch.setattr(jobs, "SIDE_BY_SIDE_BYTES", least)
        level = open_level(scene, tmp_path / str(least), limits=SMALL)
        entry = scene.put(level, ids(1, 45), turns=TURNS)
        assert [outcome.kind for outcome in drain(level)] == ["stored"]
        assert whole(scene, level, entry)
        level.close()
        assert check(tmp_path / str(least)).sound
        folder = tmp_path / str(least) / "segments"
        tail = f"-{entry.id}.seg"  # of files that are of this entry only
        names = {path.name for path in folder.iterdir() if not path.name.endswith(tail)}
        found.append({name: (folder / name).read_bytes() for name in names})
    assert len(found[0]) >= 2
    assert found[0] == found[1]


def test_two_are_written_at_the_same_time(tmp_path: Path, side_by_side: None) -> None:
    meeting, waiting = threading.Barrier(2, timeout=30), threading.Event()

    def wait(_: int, name: str, __: tuple[Any, ...]) -> int:
        if name == "write" and not waiting.is_set():
            meeting.wait()
            waiting.set()
        return 0

    scene = new_scene()
    level = open_level(scene, tmp_path, files=FaultyFiles(wait))
    entry = scene.put(level, ids(1, 45), turns=TURNS)
    assert [outcome.kind for outcome in drain(level)] == ["stored"]
    assert whole(scene, level, entry)
    level.close()


@pytest.mark.parametrize("name", ["create", "reserve", "write"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_where_one_fails_none_is_left_and_the_reason_is_told(
    tmp_path: Path, side_by_side: None, name: str, nth: int
) -> None:
    broken, lock, seen = [True], threading.Lock(), [0]

    def fail(_: int, called: str, __: tuple[Any, ...]) -> int:
        with lock:
            seen[0] += called == name
            return errno.EIO if broken[0] and called == name and seen[0] == nth else 0

    scene = new_scene()
    level = open_level(scene, tmp_path, files=FaultyFiles(fail))
    scene.put(level, ids(1, 45), turns=TURNS)
    [outcome] = drain(level)
    assert (outcome.kind, outcome.error) == ("failed", os.strerror(errno.EIO))
    assert outcome.pages is not None
    outcome.pages.release()
    assert level.usage().bytes == 0
    assert files_in(tmp_path) == []
    broken[0] = False
    entry = scene.put(level, ids(2, 45), turns=TURNS)
    assert [o.kind for o in drain(level)] == ["stored"]
    assert whole(scene, level, entry)
    level.close()
    assert scene.used == 0
