"""Every call to the operating system's files goes through :class:`Files`, so that tests can make any of them fail.

Names are given as paths; contents as lists of buffers at an offset. Errors are the system's own :class:`OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Anything with the buffer protocol.
Buffer = Any

_BINARY = getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_BLOCK = getattr(os, "O_NONBLOCK", 0)  # else opening a FIFO that lies in the folder would wait for a writer
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NO_WAIT = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None
_IOV_MAX = 512  # of the systems Strata runs on, the least is 1024


class Found(NamedTuple):
    """One name in a folder; ``size`` is what it takes on the disk, or its length where that is more."""

    name: str
    length: int
    size: int
    regular: bool
    modified: float


class Files:
    """The real files."""

    def __init__(self) -> None:
        self._seek_lock = threading.Lock()  # where there is no positioned reading

    def create(self, path: Path) -> int:
        """A new file, mode 0600, for writing and reading."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY | _NO_FOLLOW | _CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """An existing regular file, for reading. ELOOP for a symbolic link, EINVAL for what is no regular file."""
        if not _NO_FOLLOW and path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        fd = os.open(path, os.O_RDONLY | _BINARY | _NO_FOLLOW | _NO_BLOCK | _CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def load(self, path: Path | str, most: int) -> bytes:
        """The whole content of a regular file, of at most ``most`` bytes; EFBIG for a larger one."""
        if not _NO_FOLLOW and Path(path).is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        fd = os.open(path, os.O_RDONLY | _BINARY | _NO_FOLLOW | _NO_BLOCK | _CLOEXEC)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if about.st_size > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            data = os.read(fd, about.st_size)
            while len(data) < about.st_size and (more := os.read(fd, about.st_size - len(data))):
                data += more
            return data
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def length(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def length_of(self, path: Path) -> int | None:
        """Length of a regular file, None where there is none."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill the buffers from ``offset`` on. EIO where the file ends before."""
        self._all(self._read_some, fd, buffers, offset)

    def cached(self, fd: int, offset: int) -> bool:
        """Whether a byte of a file can be read without waiting for the disk; True where the system does not tell."""
        if _NO_WAIT is None:
            return True
        try:
            os.preadv(fd, [bytearray(1)], offset, _NO_WAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write the buffers from ``offset`` on."""
        self._all(self._write_some, fd, buffers, offset)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Have the disk set room aside for a new file, where it can: a full disk is noticed before anything is written,
        and writing is faster (measured on ext4: by a fifth)."""
        if _fallocate is not None and _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        """Return when the content of a file has reached the disk."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_volume(self, fd: int) -> bool:
        """The same for everything on the file's volume, which is faster for many small files. False where the system
        cannot, or would not tell of errors."""
        if _syncfs is None:
            return False
        if _syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return True

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder have reached the disk. Does nothing where folders cannot be synced."""
        if sys.platform == "win32":
            return
        fd = os.open(folder, os.O_RDONLY | _CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file. OSError where the volume has none, or the two are on different volumes."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """A folder of mode 0700, and its parents, where they are missing."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)

    def scan(self, folder: Path) -> list[Found]:
        """All names in a folder; none where the folder is missing."""
        found = []
        try:
            entries = os.scandir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        with entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted since it was listed
                size = max(about.st_size, 512 * getattr(about, "st_blocks", 0))
                regular = stat.S_ISREG(about.st_mode)
                found.append(Found(entry.name, about.st_size, size, regular, about.st_mtime))
        return found

    def free_bytes(self, folder: Path) -> int | None:
        """What an ordinary user may still write to a volume, None where the system does not say."""
        if not hasattr(os, "statvfs"):
            import shutil

            return shutil.disk_usage(folder).free
        about = os.statvfs(folder)
        return about.f_bavail * about.f_frsize

    # -- at the system ------------------------------------------------------------------------------------------

    @staticmethod
    def _all(some: Any, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Call ``some`` until all buffers are done: a call may do less than it was asked to."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            done = some(fd, left[:_IOV_MAX], offset)
            if done <= 0:
                raise OSError(errno.EIO, "the file is shorter than it should be")
            offset += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def _read_some(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, buffers, offset)
        with self._seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            with open(fd, "rb", buffering=0, closefd=False) as file:
                return file.readinto(buffers[0]) or 0

    def _write_some(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if hasattr(os, "pwritev"):
            return os.pwritev(fd, buffers, offset)
        with self._seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, buffers[0])


def _linux_function(name: str, since: tuple[int, int]) -> Any:
    """A function of the C library on Linux from a kernel version on, else None."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        version = tuple(int(part) for part in platform.release().split(".")[:2])
        return getattr(ctypes.CDLL(None, use_errno=True), name) if version >= since else None
    except (ValueError, OSError, AttributeError):
        return None


_syncfs = _linux_function("syncfs", (5, 8))  # earlier kernels do not report errors through it
_fallocate = _linux_function("fallocate", (2, 6))
