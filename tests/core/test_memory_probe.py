from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from strata_core.memory import probe
from strata_core.memory.base import MemoryState
from strata_core.memory.probe import (
    Mount,
    available_memory,
    cgroup_limit,
    linux_memory,
    parse_cgroup_membership,
    parse_cgroup_mounts,
    parse_meminfo,
    parse_stat,
    psutil_memory,
    windows_memory,
)

GIB = 1 << 30
MEMINFO = f"MemTotal:       {16 * GIB >> 10} kB\nMemAvailable: {8 * GIB >> 10} kB\nHugePages_Total:       0\nodd line\n"
V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 23 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_meminfo_is_read_in_bytes_and_odd_lines_are_left_out() -> None:
    assert parse_meminfo(MEMINFO) == {"MemTotal": 16 * GIB, "MemAvailable": 8 * GIB}


def test_mounts_of_both_versions_are_found_with_escapes_undone() -> None:
    text = V2_MOUNT + V1_MOUNT.format(root="/docker/ab\\040c") + "1 2 0:3 / /proc rw - proc proc rw\nshort\n"
    text += "34 23 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    assert parse_cgroup_mounts(text) == [
        Mount(2, "/", "/sys/fs/cgroup"),
        Mount(1, "/docker/ab c", "/sys/fs/cgroup/memory"),
    ]


def test_membership_of_both_versions_is_found() -> None:
    assert parse_cgroup_membership("5:cpu,memory:/a:b\n1:name=systemd:/c\n0::/d\n") == {1: "/a:b", 2: "/d"}


def test_stat_lines_are_numbers_by_name() -> None:
    assert parse_stat("inactive_file 4096\nbroken\nname text\n") == {"inactive_file": 4096}


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", ""])
def test_a_cgroup_without_a_limit_limits_nothing(limit: str) -> None:
    assert cgroup_limit(limit, "100\n", 0) is None


def test_a_cgroup_leaves_its_limit_less_what_cannot_be_dropped() -> None:
    found = cgroup_limit("1000\n", "700\n", 200)
    assert found is not None
    assert (found.total, found.available) == (1000, 500)
    over = cgroup_limit("1000\n", "1200\n", 0)
    assert over is not None
    assert over.available == 0


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert linux_memory(tree(tmp_path, {"proc/meminfo": MEMINFO})) == MemoryState(16 * GIB, 8 * GIB, "MemAvailable")


def test_without_anything_memory_is_unknown(tmp_path: Path) -> None:
    assert linux_memory(tmp_path) == MemoryState(None, None, "unknown")


def test_a_limit_of_any_ancestor_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"inactive_file {GIB}\n",
            "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job/memory.current": "5\n",
        },
    )
    found = linux_memory(root)
    assert (found.total, found.available) == (4 * GIB, 2 * GIB)
    assert found.source.endswith("user.slice")


def test_a_limit_above_what_the_machine_has_changes_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert linux_memory(root) == MemoryState(16 * GIB, 8 * GIB, "MemAvailable")


@pytest.mark.parametrize(
    ("mounted", "own"),
    [("/docker/abc", "/docker/abc"), ("/", "/../../docker/abc"), ("/docker/abc", "/elsewhere"), ("/", "/docker/gone")],
    ids=["host path, tail mounted", "outside the namespace", "another container's path", "removed group"],
)
def test_version_1_in_a_container_finds_its_limit_at_the_mount(tmp_path: Path, mounted: str, own: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": f"4:memory:{own}\n",
            "proc/self/mountinfo": V1_MOUNT.format(root=mounted),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        },
    )
    assert linux_memory(root).available == GIB + GIB // 2


def test_asking_again_reads_only_what_changes_and_no_statistics_of_groups_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.current": "5\n",
        },
    )
    monkeypatch.setattr(probe.time, "monotonic", lambda: 30.0)
    assert linux_memory(root).available == 8 * GIB
    read: list[str] = []
    plain = probe._read
    monkeypatch.setattr(probe, "_read", lambda path: read.append(path.name) or plain(path))
    linux_memory(root)
    assert set(read) == {"meminfo", "memory.max", "memory.current"}
    tree(root, {"sys/fs/cgroup/job/memory.max": f"{GIB}\n"})
    assert linux_memory(root).available == GIB - 5, "a limit that was lowered meanwhile counts at once"


def test_a_process_that_was_moved_is_found_in_its_new_cgroup_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT}
    small = {"sys/fs/cgroup/small/memory.max": f"{GIB}\n", "sys/fs/cgroup/small/memory.current": "0\n"}
    root = tree(tmp_path, files | small)
    now = [0.0]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    assert linux_memory(root).available == 8 * GIB
    tree(root, {"proc/self/cgroup": "0::/small\n"})
    now[0] = 60.0
    assert linux_memory(root).available == GIB


def kernel32(physical: int, commit: int, *, succeeds: bool = True) -> SimpleNamespace:
    def fill(reference: object) -> int:
        status = reference._obj  # type: ignore[attr-defined]
        assert status.dwLength == ctypes.sizeof(status) == 64
        status.ullTotalPhys, status.ullAvailPhys, status.ullAvailPageFile = 16 * GIB, physical, commit
        return int(succeeds)

    return SimpleNamespace(GlobalMemoryStatusEx=fill)


def test_windows_has_the_least_of_physical_memory_and_commit() -> None:
    assert windows_memory(kernel32(8 * GIB, 3 * GIB)) == MemoryState(16 * GIB, 3 * GIB, "commit")
    assert windows_memory(kernel32(2 * GIB, 3 * GIB)) == MemoryState(16 * GIB, 2 * GIB, "physical memory")
    assert windows_memory(kernel32(1, 1, succeeds=False)) == MemoryState(None, None, "unknown")


def test_other_platforms_ask_psutil_and_know_nothing_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert psutil_memory().total == psutil.virtual_memory().total

    def fail() -> None:
        raise NotImplementedError

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert probe.probe_memory() == MemoryState(None, None, "unknown")


def test_this_machine_has_memory() -> None:
    available, total = available_memory(), probe.probe_memory().total
    assert available is not None
    assert total is not None
    assert 0 < available <= total
