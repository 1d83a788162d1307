"""Power cuts of a real file system: a process that writes to ext4 on a loop device is halted at a random moment, and
the device is copied as it is then. What had not reached it is lost, as after a power cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from disk_kit import SMALL, new_scene, open_level, whole
from strata_tiers.check import check

TOOLS = ("mkfs.ext4", "fsck.ext4", "mount", "umount")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="needs root and the tools of ext4 for loop mounts",
    ),
]


def run(*command: object, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
    assert done.returncode in allowed, (command, done.returncode, done.stdout, done.stderr)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    run("mount", "-o", "loop,commit=1", image, folder)
    try:
        yield folder / "level"
    finally:
        run("umount", folder)


def test_whenever_the_power_goes_what_was_reported_is_there_and_all_of_it_is_whole(tmp_path: Path) -> None:
    image, snapshot, folder = tmp_path / "disk", tmp_path / "snapshot", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    run("mkfs.ext4", "-q", "-F", image)
    scene, random = new_scene(), np.random.default_rng()
    stored: set[str] = set()
    for number in range(40):
        with mounted(image, folder) as level_folder:
            child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("kill_child.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )  # fmt: skip
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{level_folder} {number}\n")
            pid = int(child.stdout.readline().split()[1])
            time.sleep(random.uniform(0, 1.0))
            os.kill(pid, signal.SIGSTOP)
            shutil.copyfile(image, snapshot)
            os.kill(pid, signal.SIGKILL)
            for line in child.stdout:
                word, *rest = line.split()
                if word == "ended":
                    break
                stored.add(rest[0]) if word == "stored" else stored.discard(rest[0])
            child.kill()
            child.communicate()
        snapshot.replace(image)
        run("fsck.ext4", "-fy", image, allowed=(0, 1))
        with mounted(image, folder) as level_folder:
            report = check(level_folder)
            assert report.sound, report.damaged
            level = open_level(scene, level_folder, limits=SMALL)
            assert stored <= {entry.id for entry in level.entries()}
            for entry in level.entries():
                assert whole(scene, level, entry)
            level.reclaim(1 << 40)
            level.close()
    assert stored
