"""The archive: superseded and rewritten copies, kept for people instead of being deleted.

The engine thread only queues; the writer's thread does the rest, in order, so that a level's files get their second
name before the level deletes them. What lies in the folder and what leaves it is :mod:`strata_tiers.shelf`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs

from strata_core.conversations.identity import Identity
from strata_core.errors import LevelError
from strata_core.store.base import Archive, Entry, Level, Outcome, Usage
from strata_tiers.cut import Limits
from strata_tiers.directory import Directory
from strata_tiers.jobs import TaskJob
from strata_tiers.layout import Shape, valid_id
from strata_tiers.level import DiskLevel, Workshop
from strata_tiers.pages import PageSource, source_of
from strata_tiers.shelf import ArchiveOptions, Offer, Shelf

log = logging.getLogger("strata.cache")


class _KeepJob(TaskJob):
    """Keeps one copy. :ivar pages: held until it is done."""

    def __init__(self, shelf: Shelf, offer: Offer, weight: int):
        super().__init__(self._keep, weight)
        self.entry = offer.entry
        self.pages: PageSource | None = offer.pages
        self.nbytes = 0
        self.parts = 0
        self.seconds = 0.0
        self._shelf = shelf
        self._offer = offer

    def _keep(self) -> None:
        start = time.perf_counter()
        self.nbytes, self.parts = self._shelf.keep(self._offer)
        self.seconds = time.perf_counter() - start


class DiskArchive(Archive):
    """See the module's docstring.

    :param root: the folder; made if it is not there.
    :raises LevelError: the folder cannot be used, or another process uses it.
    """

    name = "archive"
    rank = 50

    def __init__(
        self,
        root: Path,
        identity: Identity,
        shape: Shape,
        options: ArchiveOptions,
        workshop: Workshop,
        limits: Limits | None = None,
    ):
        self.folder = root
        self._options = options
        self._workshop = workshop
        self._writer = workshop.writer
        self._directory = Directory(root, self._writer.files)
        self._usage = (0, 0)
        self._shelf = Shelf(
            self._directory, self._writer.files, options, shape, limits or Limits(), identity.parts, self._changed
        )
        self._keeping: list[_KeepJob] = []
        self._tasks: list[TaskJob] = []
        self._shape = shape
        workshop.members.append(self)
        self._submit(self._shelf.open)

    def take(self, entry: Entry, why: str, source: Level) -> None:
        if not valid_id(entry.id):
            raise LevelError(f"{entry.id!r} cannot be part of a file's name")
        kept = attrs.evolve(entry, reason=why, used=time.time(), pinned=False)
        offer, weight = Offer(kept), 0
        if self._options.mode == "state":
            held = source.held(entry)
            if held is not None:
                offer = Offer(kept, pages=source_of(held))
                weight = self._shape.block_bytes * len(held.tables[0])
                weight += self._shape.state_bytes * len(entry.states or ())
            elif isinstance(source, DiskLevel) and source.writer is self._writer:
                offer = Offer(kept, files=source.files_of(entry))
            else:
                raise LevelError(f"the archive cannot read what level {source.name} holds")
        job = _KeepJob(self._shelf, offer, weight)
        try:
            self._writer.submit(job)
        except BaseException:
            if offer.pages is not None:
                offer.pages.release()
            raise
        self._keeping.append(job)

    def forget(self, conversation: str, tenant: str | None) -> None:
        self._submit(partial(self._shelf.forget, conversation, tenant))

    def expire(self, now: float) -> None:
        if self._options.max_age_s:
            self._submit(partial(self._shelf.expire, now))

    def usage(self) -> Usage:
        nbytes, copies = self._usage
        return Usage(nbytes, copies, self._options.max_bytes, None)

    def busy(self) -> bool:
        return bool(self._keeping or self._tasks)

    def poll(self) -> Sequence[Outcome]:
        self.pump()
        for task in [task for task in self._tasks if task.done]:
            self._tasks.remove(task)
            if task.error:
                log.warning("the archive in %s could not be looked after: %s", self.folder, task.error)
        return [self._tell(job) for job in list(self._keeping) if job.done]

    def settle(self) -> None:
        waiting = [job for job in self._keeping if job.pages is not None]
        self._wait(waiting)
        for job in waiting:
            self._give_back(job)

    def flush(self) -> None:
        """Return when everything that was taken is kept or has failed, which ``poll`` tells."""
        self._wait(self._keeping)

    def close(self) -> None:
        self._wait([*self._keeping, *self._tasks])
        for outcome in self.poll():
            if outcome.kind == "failed":
                log.warning("the archive lost a copy at its end: %s", outcome.error)
        self._workshop.leave(self)
        self._directory.close()

    def pump(self) -> None:
        for job in self._keeping:
            if job.pages is not None and not job.done:
                job.pages.pump()

    # -- inside -------------------------------------------------------------------------------------------------

    def _changed(self, nbytes: int, copies: int) -> None:
        self._usage = (nbytes, copies)

    def _submit(self, task: Callable[[], None]) -> None:
        job = TaskJob(task)
        self._tasks.append(job)
        self._writer.submit(job)

    def _wait(self, jobs: Sequence[TaskJob]) -> None:
        waiting = list(jobs)
        self._workshop.wait(lambda: all(job.done for job in waiting))

    def _tell(self, job: _KeepJob) -> Outcome:
        self._keeping.remove(job)
        self._give_back(job)
        if job.error:
            return Outcome("failed", job.entry, seconds=job.seconds, error=job.error)
        return Outcome("stored", job.entry, job.nbytes, job.parts, job.seconds)

    @staticmethod
    def _give_back(job: _KeepJob) -> None:
        pages, job.pages = job.pages, None
        if pages is not None:
            pages.release()
