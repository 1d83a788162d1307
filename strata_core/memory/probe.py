"""How much memory this process may use.

Linux: ``MemAvailable`` and the limits of every memory cgroup the process is in (versions 1 and 2), whichever leaves
least. Windows: the least of physical memory and commit. Others: psutil. What cannot be known is None, and the rules of
placement then refuse RAM instead of guessing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from strata_core.memory.base import MemoryState

UNLIMITED_V1 = 1 << 62
"""Version 1 has no word for "no limit" but a number near 2^63, rounded down to pages."""

_LOOK_AGAIN_S = 60.0
"""How long the process is taken to stay in its cgroups. Finding them costs more than reading their limits, and every
conversation that is parked asks for the memory that is available."""


def probe_memory() -> MemoryState:
    """Measure the memory of this machine or container now. Never raises."""
    if sys.platform == "linux":
        return linux_memory(Path("/"))
    if sys.platform == "win32":
        return windows_memory(_kernel32())
    return psutil_memory()


def available_memory() -> int | None:
    """Bytes that can be allocated now without swapping or being killed; None if unknown."""
    return probe_memory().available


# -- Linux ------------------------------------------------------------------------------------------------------


def linux_memory(root: Path) -> MemoryState:
    """Memory as told by ``/proc`` and the cgroup file systems below ``root`` (``/`` except in tests)."""
    meminfo = parse_meminfo(_read(root / "proc/meminfo"))
    total, available, source = meminfo.get("MemTotal"), meminfo.get("MemAvailable"), "MemAvailable"
    for folder, version in _known_cgroups(root, int(time.monotonic() / _LOOK_AGAIN_S)):
        limit = _cgroup_limit(folder, version)
        if limit is None:
            continue
        total = limit.total if total is None else min(total, limit.total)
        if available is None or limit.available < available:
            available, source = limit.available, f"cgroup {folder}"
    return MemoryState(total, available, source if available is not None else "unknown")


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; lines that are not ``name: number kB`` are left out."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


@attrs.frozen
class Mount:
    """A mounted cgroup hierarchy: ``root`` is the cgroup that is visible at ``point``."""

    version: int
    root: str
    point: str


def parse_cgroup_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of ``/proc/self/mountinfo`` that have a memory controller (proc(5))."""
    found = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        root, point = (_unescape(field) for field in fields[3:5])
        if kind[0] == "cgroup2":
            found.append(Mount(2, root, point))
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            found.append(Mount(1, root, point))
    return found


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def parse_cgroup_membership(text: str) -> dict[int, str]:
    """Own cgroup of the version 2 hierarchy and of version 1's memory hierarchy, from ``/proc/self/cgroup``."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            found[2] = path
        elif "memory" in controllers.split(","):
            found[1] = path
    return found


def memory_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the process's own memory cgroup and all its ancestors that are visible, with their version."""
    membership = parse_cgroup_membership(_read(root / "proc/self/cgroup"))
    for mount in parse_cgroup_mounts(_read(root / "proc/self/mountinfo")):
        own = membership.get(mount.version)
        if own is None:
            continue
        point = root / mount.point.lstrip("/")
        below = PurePosixPath(own)
        # In a container without a cgroup namespace the path is the host's, but only its tail is mounted.
        if mount.root != "/" and below.is_relative_to(mount.root):
            below = PurePosixPath("/") / below.relative_to(mount.root)
        folder = point.joinpath(*[part for part in below.parts[1:] if part != ".."])
        if not folder.is_dir():
            folder = point
        while True:
            yield folder, mount.version
            if folder == point:
                break
            folder = folder.parent


@lru_cache(maxsize=1)
def _known_cgroups(root: Path, period: int) -> tuple[tuple[Path, int], ...]:
    """:func:`memory_cgroups`, looked up once in a ``period``."""
    return tuple(memory_cgroups(root))


def _cgroup_limit(folder: Path, version: int) -> _Limit | None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, usage = _read(folder / names[0]), _read(folder / names[1])
    if cgroup_limit(limit, usage, 0) is None:
        return None  # without the statistics, which the kernel has to add up first
    stat = parse_stat(_read(folder / "memory.stat"))
    return cgroup_limit(limit, usage, stat.get("inactive_file" if version == 2 else "total_inactive_file", 0))


@attrs.frozen
class _Limit:
    total: int
    available: int


def cgroup_limit(limit: str, usage: str, inactive_file: int) -> _Limit | None:
    """What a cgroup leaves: its limit less its usage, where page cache that is not in use counts as free.

    :param limit: text of ``memory.max`` (or ``memory.limit_in_bytes``); ``max`` and huge numbers are no limit.
    :param inactive_file: bytes of file cache that the kernel drops first.
    """
    if not limit.strip().isdigit() or not usage.strip().isdigit() or int(limit) >= UNLIMITED_V1:
        return None
    used = max(0, int(usage) - inactive_file)
    return _Limit(int(limit), max(0, int(limit) - used))


def parse_stat(text: str) -> dict[str, int]:
    """``memory.stat``: ``name number`` lines."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    """The file's text, or nothing: files of /proc and cgroups come and go, and absence only means less is known."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- Windows and others -----------------------------------------------------------------------------------------


def _kernel32() -> Any:
    import ctypes

    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32", use_last_error=True)
    raise OSError("kernel32 is only on Windows")


def windows_memory(kernel32: Any) -> MemoryState:
    """Memory as told by ``GlobalMemoryStatusEx``: an allocation needs physical memory to be fast, commit to succeed.

    :param kernel32: the library, or an object with the same function.
    """
    import ctypes

    class MemoryStatusEx(ctypes.Structure):
        _fields_ = (
            ("dwLength", ctypes.c_uint32),
            ("dwMemoryLoad", ctypes.c_uint32),
            ("ullTotalPhys", ctypes.c_uint64),
            ("ullAvailPhys", ctypes.c_uint64),
            ("ullTotalPageFile", ctypes.c_uint64),
            ("ullAvailPageFile", ctypes.c_uint64),
            ("ullTotalVirtual", ctypes.c_uint64),
            ("ullAvailVirtual", ctypes.c_uint64),
            ("ullAvailExtendedVirtual", ctypes.c_uint64),
        )

    status = MemoryStatusEx()
    status.dwLength = ctypes.sizeof(status)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return MemoryState(None, None, "unknown")
    source = "physical memory" if status.ullAvailPhys <= status.ullAvailPageFile else "commit"
    return MemoryState(status.ullTotalPhys, min(status.ullAvailPhys, status.ullAvailPageFile), source)


def psutil_memory() -> MemoryState:
    """Memory as told by psutil; unknown where psutil does not know the platform."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, NotImplementedError):
        return MemoryState(None, None, "unknown")
    return MemoryState(memory.total, memory.available, "psutil")
