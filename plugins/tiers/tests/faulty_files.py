"""Files that fail when they are told to, and files that remember what a power cut would leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from strata_tiers.files import Files

#: Every call that goes to the system.
CALLS = (
    "create", "open", "load", "length", "length_of", "read", "write", "reserve", "sync", "sync_volume", "sync_folder",
    "rename", "link", "unlink", "make_folder", "scan", "free_bytes",
)  # fmt: skip


class FaultyFiles(Files):
    """:param fails: called with the number of a call, its name and its arguments; returns an errno to fail with, or 0.
    :ivar calls: names of all calls so far.
    """

    def __init__(self, fails: Callable[[int, str, tuple[Any, ...]], int]):
        super().__init__()
        self.fails = fails
        self.calls: list[str] = []
        self._counting = threading.Lock()

    def ask(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._counting:
            number = len(self.calls)
            self.calls.append(name)
        code = self.fails(number, name, arguments)
        if code:
            if name == "write":  # a torn write: some of it is there
                fd, buffers, offset = arguments
                half = memoryview(buffers[0]).cast("B")
                os.pwrite(fd, half[: len(half) // 2], offset)
            raise OSError(code, os.strerror(code))


def _faulty(name: str) -> Callable[..., Any]:
    def call(self: FaultyFiles, *arguments: Any) -> Any:
        self.ask(name, arguments)
        return getattr(Files, name)(self, *arguments)

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _faulty(_name))


@attrs.define(eq=False)
class _Inode:
    """``content`` is what programs see, ``safe`` what a power cut leaves for sure (None: nothing was synced)."""

    content: bytearray = attrs.field(factory=bytearray)
    safe: bytes | None = None


class PowerFiles(Files):
    """The real files, and a record of every change, from which :meth:`after_cut` makes what a power cut would leave.

    :ivar log: changes and what the test noted, in order.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.log: list[tuple[Any, ...]] = []
        self._fds: dict[int, _Inode] = {}

    def note(self, *what: Any) -> None:
        self.log.append(("note", *what))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._fds[fd] = inode = _Inode()
        self.log.append(("name", path, inode))
        return fd

    def close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        super().write(fd, buffers, offset)
        self.log.append(("write", self._fds[fd], b"".join(bytes(memoryview(b).cast("B")) for b in buffers), offset))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.log.append(("sync", self._fds[fd]))

    def sync_volume(self, fd: int) -> bool:
        return False  # so that every file has to be synced by name

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.log.append(("sync folder", folder))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(("unlink", path))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.log.append(("link", source, target))

    def after_cut(self, count: int, image: Path, random: np.random.Generator) -> list[tuple[Any, ...]]:
        """Make the folder as it may be after a power cut behind the first ``count`` records. What was not synced is
        there, or not, or in part, as ``random`` says. Returns the test's notes up to there."""
        seen: dict[Path, _Inode] = {}  # names as programs see them
        safe: dict[Path, _Inode] = {}  # names that are on the disk
        pending: dict[Path, list[tuple[Any, ...]]] = {}
        notes = []
        for record in self.log[:count]:
            kind, *rest = record
            if kind == "note":
                notes.append(tuple(rest))
            elif kind == "write":
                inode, data, offset = rest
                inode.content[len(inode.content) : offset] = bytes(max(0, offset - len(inode.content)))
                inode.content[offset : offset + len(data)] = data
            elif kind == "sync":
                rest[0].safe = bytes(rest[0].content)
            elif kind == "sync folder":
                for change in pending.pop(rest[0], []):
                    _apply(safe, change)
            else:
                change = _as_change(seen, record)
                _apply(seen, change)
                pending.setdefault(rest[-2].parent if kind == "name" else rest[-1].parent, []).append(change)
        for changes in pending.values():
            mode = random.integers(3)  # none, all, or any
            for change in changes:
                if mode == 1 or (mode == 2 and random.integers(2)):
                    _apply(safe, change)
        for path, inode in safe.items():
            target = image / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_left_of(inode, random))
        for record in self.log:  # the inodes are shared by all cuts
            for inode in record:
                if isinstance(inode, _Inode):
                    inode.content, inode.safe = bytearray(), None
        return notes


def _as_change(seen: dict[Path, _Inode], record: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, *rest = record
    if kind in ("rename", "link"):
        return (kind, *rest, seen[rest[0]])
    return record


def _apply(names: dict[Path, _Inode], change: tuple[Any, ...]) -> None:
    kind, *rest = change
    if kind == "name":
        names[rest[0]] = rest[1]
    elif kind == "unlink":
        names.pop(rest[0], None)
    else:
        source, target, inode = rest
        if kind == "rename":
            names.pop(source, None)
        names[target] = inode


def _left_of(inode: _Inode, random: np.random.Generator) -> bytes:
    """What is left of a file: the synced content, or anything at all where it changed since, or never was synced."""
    if inode.safe is not None and inode.safe == bytes(inode.content):
        return inode.safe
    content = bytes(inode.content)
    return (b"", bytes(len(content)), content[: len(content) // 2], content)[int(random.integers(4))]
