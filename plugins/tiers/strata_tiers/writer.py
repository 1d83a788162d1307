"""One thread that does all writing of a process's disk levels, in order, and commits what is ready together. Only the
segments of a large entry are written by two.

Jobs are done first in, first out, with two exceptions: a job that has to wait for room is passed over, and the older
state of a conversation goes behind a newer one and waits until that is stored, since by then it has mostly become
needless.

A commit is a handful of syncs however many entries it holds. While one is under way others queue up, and go together
next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from strata_core.errors import LevelError
from strata_tiers.commit import Commit, give_up
from strata_tiers.files import Files
from strata_tiers.jobs import DropJob, Job, ManifestJob, StoreJob, TaskJob

log = logging.getLogger("strata.disk")

#: Bounds of a commit: jobs, and bytes of segments.
GROUP_JOBS, GROUP_BYTES = 64, 256 << 20


class Writer:
    """:param queue_bytes: most that waiting entries may keep in memory; one entry is taken whatever its size."""

    def __init__(self, files: Files | None = None, queue_bytes: int = 1 << 30):
        self.files = files or Files()
        self.queue_bytes = queue_bytes
        self._queue: deque[Job] = deque()
        self._behind: list[tuple[StoreJob, StoreJob]] = []  # (older state, the newer one it waits for)
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._version = 0  # of what the queue holds and what it waits for
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- called by the engine thread ----------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job.

        :raises LevelError: too much is waiting already.
        """
        with self._changed:
            waiting = sum(other.weight for other in (*self._queue, *self._running))
            if job.weight and waiting and waiting + job.weight > self.queue_bytes:
                raise LevelError(f"the disk is behind: {waiting >> 20} MiB wait to be written")
            self._queue.append(job)
            if isinstance(job, StoreJob) and job.source is not None:
                self._put_behind(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="strata-disk", daemon=True)
                self._thread.start()
            self._touch()

    def tend(self) -> None:
        """Let older states go on whose newer one was stored; the coordinator has had the chance to drop them."""
        with self._changed:
            for pair in [pair for pair in self._behind if pair[1].told]:
                self._behind.remove(pair)
                self._queue.append(pair[0])
                self._touch()

    def wake(self) -> None:
        """Look at the queue again: what a job waits for may have changed."""
        with self._changed:
            self._touch()

    def wait(self, finished: Callable[[], bool], pump: Callable[[], None]) -> None:
        """Return when ``finished``. Whatever waits for room or for a newer state goes on without; ``pump`` is called
        now and then."""
        with self._changed:
            for older, _ in self._behind:
                self._queue.append(older)
            self._behind.clear()
            for job in self._queue:
                job.forced = True
            self._touch()
        while True:
            pump()
            with self._changed:
                if finished():
                    return
                self._changed.wait(0.002)

    def close(self) -> None:
        """End the thread when everything is done."""
        with self._changed:
            self._closed = True
            self._touch()
        if self._thread is not None:
            self._thread.join()

    def _put_behind(self, newer: StoreJob) -> None:
        for job in list(self._queue):
            if (
                isinstance(job, StoreJob)
                and job is not newer
                and job.source is not None
                and job.place is newer.place
                and job.conversation == newer.conversation
            ):
                self._queue.remove(job)
                self._behind.append((job, newer))

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._do(batch)
            except Exception as error:
                # Not foreseen. The jobs have failed; the writer goes on for the others.
                log.exception("writing failed")
                for job in batch:
                    if not job.done and isinstance(job, ManifestJob):
                        give_up(job, error)
                    job.done = True
            with self._changed:
                self._running = []
                self._touch()

    def _next(self) -> list[Job] | None:
        """Wait for jobs that can be done together: of one kind, in order. None when the writer is closed and done.

        Whether a job is ready is asked without holding the queue's lock, as the answer takes its level's: levels submit
        jobs with theirs held.
        """
        while True:
            with self._changed:
                version, queue = self._version, list(self._queue)
                if self._closed and not queue:
                    return None
            batch = _together(queue)
            with self._changed:
                if version != self._version:
                    continue
                if batch:
                    for job in batch:
                        self._queue.remove(job)
                    self._running = batch
                    return batch
                self._changed.wait()

    def _touch(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _do(self, batch: Sequence[Job]) -> None:
        drops = [job for job in batch if isinstance(job, DropJob)]
        if drops:
            self._drop(drops)
        for job in batch:
            if isinstance(job, TaskJob):
                job.run()
        stores = [job for job in batch if isinstance(job, ManifestJob)]
        if stores:
            again = Commit(self.files, stores, self.wake).run()
            with self._changed:
                self._queue.extendleft(reversed(again))
                self._touch()

    def _drop(self, jobs: Sequence[DropJob]) -> None:
        for job in jobs:
            job.unlink(job.manifests)
        for place in {id(job.place): job.place for job in jobs if job.manifests and job.others}.values():
            try:
                place.files.sync_folder(place.directory.conversations)
            except OSError as error:
                log.warning("level %s: %s", place.name, error)
        for job in jobs:
            job.unlink(job.others)
            job.finish()


def _together(queue: Sequence[Job]) -> list[Job]:
    batch: list[Job] = []
    nbytes = 0
    for job in queue:
        if batch and (job.kind != batch[0].kind or len(batch) >= GROUP_JOBS or nbytes > GROUP_BYTES):
            break
        if job.ready():
            batch.append(job)
            nbytes += job.weight
    return batch
