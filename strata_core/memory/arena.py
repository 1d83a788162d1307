"""Arenas over anonymous memory maps: the portable one and Linux's with large pages.

Large pages halve the cost of random access and of first touch. On Linux a block comes, in this order, from 2 MiB
hugetlb pages where the administrator configured some, from transparent huge pages (``madvise``), from normal pages.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strata_core.errors import OutOfMemory
from strata_core.memory.base import Arena, Block, LargePages, LargePagesReport

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Arena", "Block", "LinuxArena", "MapBlock", "PortableArena", "parse_smaps"]

LARGE_PAGE = 2 << 20
_MAP_HUGETLB_2M = 0x40000 | 21 << 26  # MAP_HUGETLB | log2(2 MiB) << MAP_HUGE_SHIFT, asm-generic/mman.h
_HUGETLB_MACHINES = frozenset({"x86_64", "aarch64"})
_THP_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class MapBlock(Block):
    """A block in an anonymous map of its own.

    :param start: offset of the block's first byte in ``memory``, a multiple of the page size.
    :param transparent: the kernel may back it with huge pages on its own; what it did is read from ``smaps``.
    :param hugetlb: all of it is on hugetlb pages.
    """

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int, *, transparent: bool = False, hugetlb: bool = False):
        self.nbytes = nbytes
        self._memory: mmap.mmap | None = memory
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8, nbytes, start)
        self._transparent = transparent
        self._hugetlb = hugetlb

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise ValueError("the block is closed")
        return self._array

    @property
    def closed(self) -> bool:
        return self._array is None

    @property
    def large_bytes(self) -> int:
        array = self._array
        if array is None:
            return 0
        if self._hugetlb:
            return self.nbytes
        if not self._transparent:
            return 0
        address = array.ctypes.data
        text = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
        return min(self.nbytes, parse_smaps(text, address, address + self.nbytes))

    def close(self) -> None:
        memory, self._array, self._memory = self._memory, None, None
        if memory is None:
            return
        if sys.platform == "linux":
            # The pages go now, even if somebody kept a view: it reads zeros and pins only addresses, not memory.
            # Kernels before 5.18 refuse this for hugetlb pages, which then go with the map.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):  # a view is left: the map goes with it
            memory.close()


class PortableArena(Arena):
    """Blocks of normal pages, on any platform.

    :param mode: ``auto`` falls back to normal pages; ``require`` fails, as this arena knows no other.
    """

    def __init__(self, mode: LargePages):
        self.mode = mode
        self._lock = threading.Lock()
        self._blocks: weakref.WeakSet[MapBlock] = weakref.WeakSet()
        self._reasons: dict[str, None] = {}

    def allocate(self, nbytes: int) -> Block:
        if nbytes < 1:
            raise ValueError(f"a block of {nbytes} bytes cannot be allocated")
        block = self._make(nbytes)
        with self._lock:
            self._blocks.add(block)
        return block

    def large_pages_report(self) -> LargePagesReport:
        with self._lock:
            blocks, reasons = list(self._blocks), tuple(self._reasons)
        sizes = [(block.large_bytes, block.nbytes) for block in blocks if not block.closed]
        large = sum(size[0] for size in sizes)
        return LargePagesReport(self.mode, large, sum(size[1] for size in sizes) - large, reasons)

    def _make(self, nbytes: int) -> MapBlock:
        """A block as the mode asks for it; subclasses know better ones."""
        if self.mode != "off":
            self._fall_back(nbytes, "large pages are not supported on this platform")
        return MapBlock(_map(nbytes), 0, nbytes)

    def _fall_back(self, nbytes: int, reason: str) -> None:
        """Note why a block is not on large pages; an error where they are required."""
        with self._lock:
            self._reasons[reason] = None
        if self.mode == "require":
            raise OutOfMemory(f"large pages are required, but not to be had for {nbytes} bytes: {reason}")


class LinuxArena(PortableArena):
    """Blocks on hugetlb pages, transparent huge pages or normal pages, see the module's docstring.

    ``require`` touches a transparent block at once and looks at what the kernel did, as ``madvise`` promises nothing.
    """

    def _make(self, nbytes: int) -> MapBlock:
        if self.mode == "off":
            return MapBlock(_map(nbytes), 0, nbytes)
        if nbytes < LARGE_PAGE:
            self._fall_back(nbytes, "blocks below 2 MiB")
            return MapBlock(_map(nbytes), 0, nbytes)
        return self._hugetlb(nbytes) or self._transparent(nbytes)

    def _hugetlb(self, nbytes: int) -> MapBlock | None:
        if platform.machine() not in _HUGETLB_MACHINES:
            return None
        rounded = -(-nbytes // LARGE_PAGE) * LARGE_PAGE
        try:  # the kernel reserves the pages here or refuses; they cannot be missing later
            memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB_2M)
        except OSError:
            return None
        return MapBlock(memory, 0, nbytes, hugetlb=True)

    def _transparent(self, nbytes: int) -> MapBlock:
        switch = _read_switch(_THP_SWITCH)
        if switch not in ("always", "madvise"):
            self._fall_back(nbytes, f"no free hugetlb pages, and transparent huge pages are {switch}")
            return MapBlock(_map(nbytes), 0, nbytes)
        rounded = -(-nbytes // LARGE_PAGE) * LARGE_PAGE
        # Spare addresses, never touched, to align in. What is left of them on either side also keeps the kernel from
        # merging two blocks into one map, whose huge pages could not be told apart.
        memory = _map(rounded + LARGE_PAGE)
        start = -np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE
        memory.madvise(mmap.MADV_HUGEPAGE, start, rounded)
        block = MapBlock(memory, start, nbytes, transparent=True)
        if self.mode == "require":
            block.array[::LARGE_PAGE] = 0
            large = block.large_bytes
            if large < nbytes:
                block.close()
                self._fall_back(nbytes, f"the kernel gave transparent huge pages for {large} bytes only")
        return block


def _map(nbytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemory(f"the system gave no block of {nbytes} bytes: {error}") from None


def _read_switch(path: Path) -> str:
    """The bracketed word of a kernel switch such as ``always [madvise] never``; ``absent`` without the file."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return "absent"
    return next((word.strip("[]") for word in words if word.startswith("[")), "absent")


def parse_smaps(text: str, start: int, end: int) -> int:
    """Bytes on transparent huge pages (``AnonHugePages``) of the maps that overlap ``[start, end)``."""
    total, inside = 0, False
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        low, dash, high = first.partition("-")
        if dash and not first.endswith(":"):
            inside = int(low, 16) < end and int(high, 16) > start
        elif inside and first == "AnonHugePages:":
            total += int(rest.split()[0]) * 1024
    return total
