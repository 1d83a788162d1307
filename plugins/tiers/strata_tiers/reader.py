"""Reads blocks into memory and verifies each page right after it was read, while it is in the processor's cache.

How the work is shared decides the speed. A file that comes from the disk is read by one thread from its beginning to
its end: two would disturb the system's read-ahead and wait for each other at the file's page cache (measured: 83-88 %
of one thread's rate). Two such files are read at the same time, which asks more of the disk than any one reader does
(120-140 % of reading one after the other). A file that is in the page cache is shared by all threads. Asking the system
to read further ahead (POSIX_FADV_WILLNEED) was measured to halve the rate, POSIX_FADV_SEQUENTIAL to lower it a little.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np

from strata_tiers.files import Files
from strata_tiers.layout import page_digest

#: Less than this is read by the calling thread alone.
ALONE_BYTES = 1 << 20


@attrs.frozen(eq=False)
class Read:
    """One block: where it is, where it goes (one uint8 array per pool), and the digests of its pages."""

    fd: int
    offset: int
    buffers: tuple[np.ndarray, ...]
    digests: tuple[bytes, ...]


class Reader:
    """Several threads, the caller's among them. Both reading and hashing release the interpreter."""

    def __init__(self, files: Files, threads: int = 2):
        self._files = files
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._start = threading.Lock()

    def fill(self, reads: Sequence[Read]) -> tuple[int, str] | None:
        """Do all reads. None when all pages are what their digests say, else the number of the first read that is not,
        and why. An error of the system other than a missing end or EIO is raised.

        :raises OSError: too many open files and the like: nothing is wrong with the data.
        """
        nbytes = sum(buffer.nbytes for read in reads for buffer in read.buffers)
        work = _Work(self._files, reads)
        helpers = 0 if nbytes < ALONE_BYTES else self._threads - 1
        futures = [self._helpers().submit(work.run) for _ in range(helpers)]
        work.run()
        for future in futures:
            future.result()
        if work.error is not None:
            raise work.error
        return min(work.bad, default=None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _helpers(self) -> ThreadPoolExecutor:
        with self._start:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, "strata-read")
            return self._pool


class _Work:
    """The reads still to be done, file by file. Every thread takes a file nobody has begun, then helps with those that
    others have begun where that helps."""

    def __init__(self, files: Files, reads: Sequence[Read]):
        self.bad: list[tuple[int, str]] = []
        self.error: OSError | None = None
        self._files = files
        self._reads = reads
        by_file: dict[int, deque[int]] = {}
        for number, read in enumerate(reads):
            by_file.setdefault(read.fd, deque()).append(number)
        self._new = deque(by_file.values())
        self._begun: list[deque[int]] = []

    def run(self) -> None:
        while True:
            try:
                numbers = self._new.popleft()
            except IndexError:
                break
            last = self._reads[numbers[-1]]
            if self._files.cached(last.fd, last.offset):
                self._begun.append(numbers)
            self._finish(numbers)
        for numbers in list(self._begun):
            self._finish(numbers)

    def _finish(self, numbers: deque[int]) -> None:
        while self.error is None:
            try:
                number = numbers.popleft()
            except IndexError:
                return
            self._do(number)

    def _do(self, number: int) -> None:
        read = self._reads[number]
        try:
            self._files.read(read.fd, read.buffers, read.offset)
        except OSError as error:
            if is_damage(error):
                self.bad.append((number, str(error)))
            else:
                self.error = error
            return
        if any(page_digest(b) != digest for b, digest in zip(read.buffers, read.digests, strict=True)):
            self.bad.append((number, "a page is not what was written"))


def is_damage(error: OSError) -> bool:
    """Whether an error means that the data itself is gone, not that it cannot be had just now."""
    import errno

    return error.errno in (errno.EIO, errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.EISDIR)
