"""A process that is killed loses nothing that it had reported, and leaves nothing that is not whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_kit import SMALL, du, new_scene, open_level, whole
from strata_tiers.check import check

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills with SIGKILL, forks")


@pytest.fixture
def parker() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("kill_child.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize("kills", [12, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_whenever_it_is_killed_what_was_reported_is_there_and_all_of_it_is_whole(
    tmp_path: Path, parker: subprocess.Popen[str], kills: int
) -> None:
    assert parker.stdin is not None
    assert parker.stdout is not None
    scene, random = new_scene(), np.random.default_rng()
    stored: set[str] = set()
    for number in range(kills):
        parker.stdin.write(f"{tmp_path} {number}\n")
        for line in parker.stdout:
            word, *rest = line.split()
            if word == "pid":
                threading.Timer(random.uniform(0, 0.2), os.kill, (int(rest[0]), signal.SIGKILL)).start()
            elif word == "stored":
                stored.add(rest[0])
            elif word == "removing":
                stored.discard(rest[0])
            elif word == "ended":
                break
        report = check(tmp_path)
        assert report.sound, report.damaged
        level = open_level(scene, tmp_path, limits=SMALL)
        found = {entry.id for entry in level.entries()}
        assert stored <= found
        assert level.usage().bytes >= du(tmp_path) - (32 << 10)
        for entry in level.entries():
            assert whole(scene, level, entry)
        for entry in list(level.entries())[20:]:  # else every round would take longer than the one before
            stored.discard(entry.id)
            level.remove(entry)
        level.reclaim(1 << 40)
        level.close()
        assert check(tmp_path).clutter == []
    assert stored
    assert scene.used == 0
