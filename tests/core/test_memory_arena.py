from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from strata_core.errors import OutOfMemory
from strata_core.memory import arena as arenas
from strata_core.memory.arena import LARGE_PAGE, LinuxArena, MapBlock, PortableArena, parse_smaps
from strata_core.memory.base import Arena, LargePages, LargePagesReport
from strata_core.plugins import Plugins

MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="maps and madvise of Linux")
KINDS: list[type[PortableArena]] = [PortableArena, LinuxArena] if sys.platform == "linux" else [PortableArena]


def thp_works() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


needs_thp = pytest.mark.skipif(not thp_works(), reason="transparent huge pages are switched off on this machine")


@pytest.mark.parametrize("mode", ["off", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [1, 4097, 2 * MIB, 5 * MIB + 3])
def test_a_block_is_zero_writable_and_starts_at_a_page(
    kind: type[PortableArena], mode: LargePages, nbytes: int
) -> None:
    block = kind(mode).allocate(nbytes)
    assert (block.array.shape, block.array.dtype, block.nbytes) == ((nbytes,), np.dtype(np.uint8), nbytes)
    assert block.array.ctypes.data % mmap.PAGESIZE == 0
    assert not block.array.any()
    block.array[:] = 255
    assert block.array.min() == 255
    block.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_block_gives_its_memory_back_and_is_not_used_again(kind: type[PortableArena]) -> None:
    arena = kind("auto")
    process = psutil.Process()
    block = arena.allocate(64 * MIB)
    block.array[:] = 1
    full = process.memory_info().rss
    block.close()
    block.close()
    assert full - process.memory_info().rss > 60 * MIB
    with pytest.raises(ValueError, match="closed"):
        _ = block.array
    assert block.large_bytes == 0
    assert arena.large_pages_report().normal_bytes == 0


@on_linux
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_memory_goes_back_at_once_even_if_a_view_is_left(mode: LargePages) -> None:
    process = psutil.Process()
    block = LinuxArena(mode).allocate(64 * MIB)
    block.array[:] = 1
    view = block.array[10:20]
    full = process.memory_info().rss
    block.close()
    assert full - process.memory_info().rss > 60 * MIB
    assert not view.any()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_blocks_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be allocated"):
        PortableArena("off").allocate(nbytes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_the_system_cannot_give_is_out_of_memory(kind: type[PortableArena]) -> None:
    with pytest.raises(OutOfMemory, match="the system gave no block of 46116860184"):
        kind("auto").allocate(1 << 62)


def test_the_portable_arena_says_why_it_has_no_large_pages() -> None:
    arena = PortableArena("auto")
    blocks = [arena.allocate(4 * MIB) for _ in range(2)]
    reason = "large pages are not supported on this platform"
    assert arena.large_pages_report() == LargePagesReport("auto", 0, 8 * MIB, (reason,))
    del blocks
    assert arena.large_pages_report().normal_bytes == 0
    with pytest.raises(OutOfMemory, match=r"required, but not to be had for 4194304 bytes: .*not supported"):
        PortableArena("require").allocate(4 * MIB)


@on_linux
def test_pages_are_normal_when_large_ones_are_off() -> None:
    arena = LinuxArena("off")
    block = arena.allocate(4 * MIB)
    block.array[:] = 1
    assert arena.large_pages_report() == LargePagesReport("off", 0, 4 * MIB, ())


@on_linux
@needs_thp
def test_transparent_huge_pages_are_counted_only_where_the_kernel_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinuxArena, "_hugetlb", lambda self, nbytes: None)
    arena = LinuxArena("auto")
    used, fresh = arena.allocate(8 * MIB), arena.allocate(8 * MIB)
    assert used.array.ctypes.data % LARGE_PAGE == 0
    assert arena.large_pages_report().large_bytes == 0
    used.array[:] = 1
    assert (used.large_bytes, fresh.large_bytes) == (8 * MIB, 0)
    assert arena.large_pages_report() == LargePagesReport("auto", 8 * MIB, 8 * MIB, ())


@on_linux
@needs_thp
def test_required_large_pages_are_there_from_the_start_and_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinuxArena, "_hugetlb", lambda self, nbytes: None)
    block = LinuxArena("require").allocate(5 * MIB)
    assert block.large_bytes == 5 * MIB
    assert not block.array.any()


def fallback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: str | None) -> None:
    monkeypatch.setattr(LinuxArena, "_hugetlb", lambda self, nbytes: None)
    path = tmp_path / "enabled"
    if switch is not None:
        path.write_text(switch)
    monkeypatch.setattr(arenas, "_THP_SWITCH", path)


@on_linux
@pytest.mark.parametrize(("switch", "word"), [("always madvise [never]\n", "never"), (None, "absent")])
def test_without_huge_pages_auto_falls_back_and_require_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: str | None, word: str
) -> None:
    fallback(monkeypatch, tmp_path, switch)
    arena = LinuxArena("auto")
    block = arena.allocate(4 * MIB)
    reason = f"no free hugetlb pages, and transparent huge pages are {word}"
    assert arena.large_pages_report() == LargePagesReport("auto", 0, block.nbytes, (reason,))
    with pytest.raises(OutOfMemory, match=reason):
        LinuxArena("require").allocate(4 * MIB)


@on_linux
def test_huge_pages_that_the_kernel_did_not_give_are_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinuxArena, "_hugetlb", lambda self, nbytes: None)
    monkeypatch.setattr(arenas, "_read_switch", lambda path: "madvise")
    monkeypatch.setattr(MapBlock, "large_bytes", 2 * MIB)
    with pytest.raises(OutOfMemory, match="for 2097152 bytes only"):
        LinuxArena("require").allocate(4 * MIB)


@on_linux
def test_small_blocks_are_normal_and_say_so() -> None:
    arena = LinuxArena("auto")
    block = arena.allocate(MIB)
    assert arena.large_pages_report() == LargePagesReport("auto", 0, block.nbytes, ("blocks below 2 MiB",))


@on_linux
def test_hugetlb_pages_are_asked_for_first_and_count_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without configured hugetlb pages refuse the flag; there the map is made without it."""
    asked: list[tuple[int, int]] = []
    real = mmap.mmap

    def fake(fileno: int, length: int, flags: int) -> mmap.mmap:
        asked.append((length, flags))
        return real(fileno, length, flags=flags & ~arenas._MAP_HUGETLB_2M)

    monkeypatch.setattr(arenas.mmap, "mmap", fake)
    monkeypatch.setattr(arenas.platform, "machine", lambda: "x86_64")
    block = LinuxArena("require").allocate(5 * MIB)
    assert [length for length, _ in asked] == [6 * MIB]
    assert asked[0][1] & 0x40000
    assert block.large_bytes == 5 * MIB


SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac hg
7f0000400000-7f0000600000 rw-p 00000000 00:00 0                          [anon: x-y]
AnonHugePages:      1024 kB
"""


@pytest.mark.parametrize(
    ("start", "end", "kib"),
    [
        (0x7F0000000000, 0x7F0000400000, 2048),
        (0x7F0000400000, 0x7F0000400001, 1024),
        (0x7F00003FF000, 0x7F0000401000, 3072),
    ],
)
def test_huge_pages_are_summed_over_the_maps_of_a_range(start: int, end: int, kib: int) -> None:
    assert parse_smaps(SMAPS, start, end) == kib * 1024


def test_maps_outside_the_range_do_not_count() -> None:
    assert parse_smaps(SMAPS, 0x7F0000600000, 0x7F0000700000) == 0


def test_the_built_in_plugin_provides_this_platforms_memory() -> None:
    plugins = Plugins.load({}, builtin=("strata_core.memory.plugin",), entry_points=())
    provider = plugins.choose_memory()
    assert provider.name == ("linux" if sys.platform == "linux" else "portable")
    assert "portable" in plugins.memory()
    assert isinstance(provider.arena("auto"), Arena)
    assert provider.probe().total
