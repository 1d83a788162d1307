"""Takes jobs through a commit together, in the order of ``docs/format.md``. A job that fails, fails alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from strata_core.errors import LevelError
from strata_tiers.files import Files
from strata_tiers.jobs import Again, GivenUp, ManifestJob
from strata_tiers.place import Place

log = logging.getLogger("strata.disk")

#: With more files than this in a commit, the volume is synced as a whole.
FEW_FILES = 6
#: So often a job begins anew when a segment it relies on has gone.
TRIES = 4


class Commit:
    """One group of jobs.

    :param written: called whenever the bytes of one of them are in its files.
    """

    def __init__(self, files: Files, jobs: Sequence[ManifestJob], written: Callable[[], None]):
        self._files = files
        self._left = list(jobs)
        self._again: list[ManifestJob] = []
        self._written = written

    def run(self) -> list[ManifestJob]:
        """All steps. Returns the jobs that must go through them once more."""
        for place in self._places(self._left):
            try:
                place.directory.ensure()
            except (OSError, LevelError) as error:
                log.warning("level %s: %s", place.name, error)
                for job in [job for job in self._left if job.place is place]:
                    self._failed(job, error)
        self._each(self._left, self._write)
        self._sync_files()
        named: list[ManifestJob] = []
        self._each(self._left, lambda job: named.append(job) if job.publish_segments() else None)
        self._sync_folders([job for job in named if job in self._left], lambda place: place.directory.segments)
        self._each(self._left, lambda job: job.publish_manifest())
        self._sync_folders(self._left, lambda place: place.directory.conversations)
        for job in self._left:
            job.finish()
        return self._again

    def _each(self, jobs: Iterable[ManifestJob], step: Callable[[ManifestJob], object]) -> None:
        for job in list(jobs):
            try:
                step(job)
            except Again as error:
                job.tries += 1
                if job.tries == TRIES:
                    self._failed(job, error)
                    continue
                job.abandon()
                self._left.remove(job)
                self._again.append(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, others must not fail with it; it is reported
                self._failed(job, error)

    def _write(self, job: ManifestJob) -> None:
        job.write()
        self._written()

    def _failed(self, job: ManifestJob, error: Exception) -> None:
        self._left.remove(job)
        give_up(job, error)

    def _sync_files(self) -> None:
        fds = [fd for job in self._left for fd in job.open_files()]
        if len(fds) > FEW_FILES and len(self._places(self._left)) == 1:
            try:
                if self._files.sync_volume(fds[0]):
                    return
            except OSError as error:
                log.warning("syncing a volume failed (%s); its files are synced one by one", error)
        self._each(self._left, self._sync_job)

    def _sync_job(self, job: ManifestJob) -> None:
        for fd in job.open_files():
            self._files.sync(fd)

    def _sync_folders(self, jobs: Sequence[ManifestJob], folder: Callable[[Place], Path]) -> None:
        """Sync each folder once; where that fails, it fails for all jobs that put names there."""
        for place in self._places(jobs):
            try:
                self._files.sync_folder(folder(place))
            except OSError as error:
                for job in [job for job in jobs if job.place is place and job in self._left]:
                    self._failed(job, error)

    @staticmethod
    def _places(jobs: Iterable[ManifestJob]) -> list[Place]:
        return list({id(job.place): job.place for job in jobs}.values())


def give_up(job: ManifestJob, error: Exception) -> None:
    """End a job that did not work."""
    job.abandon()
    if isinstance(error, GivenUp):
        job.cancelled = True  # nothing that was asked for is missing
        job.finish("not wanted any more")
        return
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    job.finish(text)
    log.debug("a job of level %s failed: %s", job.place.name, text, exc_info=error)
