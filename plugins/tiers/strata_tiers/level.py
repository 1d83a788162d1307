"""A level on disk: warm and cold are two of these, with different folders and ranks.

An entry is a manifest and the segments it names; ``docs/format.md`` says how they lie on disk. All writing is done by a
:class:`~strata_tiers.writer.Writer`, off the engine thread; until an entry is committed its pages are held, and it is
served from them. :meth:`DiskLevel.load` may be called by any thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, Protocol

import attrs

from strata_core.conversations.identity import Identity
from strata_core.conversations.index import Query
from strata_core.errors import LevelError
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Outcome, Usage
from strata_tiers import scanning
from strata_tiers.adopt import AdoptJob
from strata_tiers.cut import Limits
from strata_tiers.directory import Directory
from strata_tiers.holdings import Holdings, Kept, Part
from strata_tiers.jobs import DropJob, ManifestJob, StoreJob
from strata_tiers.layout import Piece, Shape, valid_id
from strata_tiers.pages import source_of
from strata_tiers.place import Place
from strata_tiers.restore import Restorer
from strata_tiers.writer import Writer

log = logging.getLogger("strata.disk")

DAY_S = 86400.0


@attrs.frozen
class LevelOptions:
    """:ivar max_age_s: age without use after which an entry is due to leave; 0 is never.
    :ivar root_max_age_s: the same for system prompts. :ivar root_key: what those are kept under that may be found.
    :ivar for_roots: nothing but system prompts is kept here.
    """

    max_bytes: int
    when_full: Literal["evict-oldest", "reject"] = "evict-oldest"
    max_age_s: float = 0.0
    root_max_age_s: float = 0.0
    root_key: str = ""
    for_roots: bool = False
    limits: Limits = attrs.field(factory=Limits)


class Member(Protocol):
    """A level or archive whose jobs the writer does."""

    def pump(self) -> None:
        """Go on with copies from a device that jobs wait for. Called by the engine thread."""


class Workshop:
    """What the disk levels and the archive of a process share: the writer, and knowing each other.

    The writer ends when the last of them is closed.
    """

    def __init__(self, writer: Writer | None = None):
        self.writer = writer or Writer()
        self.members: list[Member] = []

    @property
    def levels(self) -> list[DiskLevel]:
        return [member for member in self.members if isinstance(member, DiskLevel)]

    def wait(self, finished: Callable[[], bool]) -> None:
        """Let the writer work until ``finished``. It does jobs in order: those of others may come first."""

        def pump() -> None:
            for member in self.members:
                member.pump()

        self.writer.wait(finished, pump)

    def leave(self, member: Member) -> None:
        self.members.remove(member)
        if not self.members:
            self.writer.close()


class DiskLevel(Level):
    """See the module's docstring.

    :param root: the folder; made if it is not there.
    :ivar report: what the start found, for the line ``disk ready (...)``.
    :raises LevelError: the folder cannot be used, or another process uses it.
    """

    #: Entries that are still being written are restored from their pages (``held``), so ``load`` only reads files.
    loads_aside = True

    def __init__(
        self,
        name: str,
        rank: int,
        root: Path,
        identity: Identity,
        shape: Shape,
        options: LevelOptions,
        workshop: Workshop,
    ):
        self.name = name
        self.rank = rank
        self.folder = root
        self.when_full = options.when_full
        self.for_roots = options.for_roots
        self._options = options
        self._workshop = workshop
        self._writer = workshop.writer
        directory = Directory(root, self._writer.files)
        holdings = Holdings(shape, options.limits, identity.parts, options.root_key)
        self.place = Place(name, self._writer.files, directory, holdings, options.max_bytes)
        self.report = scanning.take_over(self.place, identity)
        self.restorer = Restorer(self.place, self._siblings, self._drop, self._rewrite)
        self._jobs: list[StoreJob] = []
        self._rewrites: dict[str, ManifestJob] = {}
        workshop.members.append(self)

    # -- what is here -------------------------------------------------------------------------------------------

    def entries(self) -> Collection[Entry]:
        with self.place.lock:
            return [kept.entry for kept in self._holdings.kept.values()]

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        with self.place.lock:
            return self._holdings.find(query, excluded)

    def holds(self, entry_id: str) -> bool:
        with self.place.lock:
            return entry_id in self._holdings.kept

    def beginnings(self, entry: Entry) -> list[Entry]:
        with self.place.lock:
            return self._holdings.beginnings(entry)

    def expired(self, now: float) -> list[Entry]:
        options = self._options
        if not options.max_age_s and not options.root_max_age_s:
            return []
        ages = {False: options.max_age_s or math.inf, True: options.root_max_age_s or math.inf}
        due = [e for e in self.entries() if not e.pinned and now - e.used > ages[e.root]]
        return sorted(due, key=lambda entry: entry.used)

    def usage(self) -> Usage:
        with self.place.lock:
            return Usage(self._holdings.nbytes, self._holdings.staying, self._options.max_bytes, None)

    def weigh(self, entries: Collection[Entry]) -> int:
        with self.place.lock:
            return self._holdings.weigh(entries)

    def cost(self, entry: Entry) -> int:
        with self.place.lock:
            return self._holdings.cost(entry, self._holdings.plan(entry))

    # -- in and out ---------------------------------------------------------------------------------------------

    def put(self, entry: Entry, pages: HeldPages) -> None:
        source = None
        with self.place.lock:
            kept, weight = self._take_in(entry)
            try:
                source = source_of(pages)
                kept.job = StoreJob(self.place, entry, source, max(1, weight))
                self._writer.submit(kept.job)
            except BaseException:
                self._holdings.remove(entry.id)
                if source is not None:
                    source.release()
                raise
            self._jobs.append(kept.job)

    def adopt(self, entry: Entry, source: Level) -> None:
        if not isinstance(source, DiskLevel) or source._writer is not self._writer:
            super().adopt(entry, source)
            return
        if not source.holds(entry.id):
            raise LevelError(f"level {source.name} does not hold the entry")
        with self.place.lock:
            kept, _ = self._take_in(entry)
            kept.job = AdoptJob(self.place, entry, source)
            self._writer.submit(kept.job)
            self._jobs.append(kept.job)

    def set_leaving(self, entry: Entry, leaving: bool) -> None:
        with self.place.lock:
            self._holdings.set_leaving(entry.id, leaving)
        self._writer.wake()

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        self.restorer.load(entry, tokens, sink)

    def files_of(self, entry: Entry) -> list[tuple[Piece, Path]]:
        """The segments of an entry that is stored, with their files, from position 0 on."""
        with self.place.lock:
            return [(part.piece, self.place.segment_path(part)) for part in self._kept(entry).parts]

    @property
    def writer(self) -> Writer:
        """What does its writing, and deletes its files, in order."""
        return self._writer

    def held(self, entry: Entry) -> HeldPages | None:
        with self.place.lock:
            kept = self._kept(entry)
            return kept.job.source.pages if kept.job is not None and kept.job.source is not None else None

    def remove(self, entry: Entry) -> None:
        with self.place.lock:
            self._kept(entry)
            kept, free = self._holdings.remove(entry.id)
            if kept.job is not None:
                kept.job.cancelled = True
                if kept.job.source is not None:
                    kept.job.source.stop()
            self._drop([self.place.manifest_path(entry.id)], free)

    def update(self, entry: Entry) -> None:
        with self.place.lock:
            kept = self._kept(entry)
            if (kept.entry.used, kept.entry.pinned) == (entry.used, entry.pinned):
                return
            kept.entry = attrs.evolve(kept.entry, used=entry.used, pinned=entry.pinned)
            self._rewrite(kept.entry.id)

    def reclaim(self, nbytes: int) -> None:
        with self.place.lock:
            going, total = [], 0
            for path, cost in self.place.garbage.items():
                if total >= nbytes:
                    break
                going.append(path)
                total += cost
            for path in going:
                self.place.gone(path)
            if going:
                self._writer.submit(DropJob(self.place, [], going))

    # -- background ---------------------------------------------------------------------------------------------

    def busy(self) -> bool:
        return bool(self._jobs)

    def poll(self) -> Sequence[Outcome]:
        self._writer.tend()
        if not self._jobs:
            return ()
        self.pump()
        return [outcome for job in list(self._jobs) if job.done and (outcome := self._tell(job)) is not None]

    def settle(self) -> None:
        waiting = [job for job in self._jobs if job.source is not None]
        self._workshop.wait(lambda: all(job.written or job.done for job in waiting))
        for job in waiting:
            with self.place.lock:
                if not job.readers and not (job.done and job.error):
                    self._give_back(job)

    def flush(self) -> None:
        waiting: list[ManifestJob] = [*self._jobs, *self._rewrites.values()]
        self._workshop.wait(lambda: all(job.done for job in waiting))
        errors = [job.error for job in waiting if job.error and not job.cancelled]
        if errors:
            raise LevelError(f"{len(errors)} of {len(waiting)} conversations were not written: {errors[0]}")

    def close(self) -> None:
        self._workshop.wait(lambda: all(job.done and not job.readers for job in self._jobs))
        for job in list(self._jobs):
            outcome = self._tell(job)
            if outcome is not None and outcome.kind == "failed":
                log.warning("level %s lost a conversation at its end: %s", self.name, outcome.error)
            if outcome is not None and outcome.pages is not None:
                outcome.pages.release()
        last = DropJob(self.place, [], [])
        self._writer.submit(last)
        self._workshop.wait(lambda: last.done and all(j.done for j in self._rewrites.values()))
        self._workshop.leave(self)
        self.restorer.close()
        self.place.directory.close()

    def pump(self) -> None:
        for job in self._jobs:
            if job.source is not None and not job.done:
                job.source.pump()

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _holdings(self) -> Holdings:
        return self.place.holdings

    def _siblings(self) -> list[Place]:
        return [level.place for level in self._workshop.levels if level is not self]

    def _kept(self, entry: Entry) -> Kept:
        kept = self._holdings.kept.get(entry.id)
        if kept is None:
            raise LevelError(f"level {self.name} does not hold the entry any more")
        return kept

    def _take_in(self, entry: Entry) -> tuple[Kept, int]:
        """List a new entry whose job is about to begin; also the bytes of its segments that are new."""
        if not valid_id(entry.id):
            raise LevelError(f"{entry.id!r} cannot be part of a file's name")
        if entry.id in self._holdings.kept:
            raise LevelError(f"level {self.name} holds the entry already")
        if entry.id in self.place.taken:
            raise LevelError(f"the folder of level {self.name} has another's conversation of this id")
        pieces = self._holdings.plan(entry)
        cost = self._holdings.cost(entry, pieces)
        if self._holdings.nbytes + cost > self._options.max_bytes:
            raise LevelError(
                f"no room on level {self.name}: {self._holdings.nbytes} bytes held, {cost} more, "
                f"{self._options.max_bytes} allowed"
            )
        new = sum(piece.size for piece in pieces if self._holdings.part(piece.name) is None)
        return self._holdings.add(entry, pieces), new

    def _tell(self, job: StoreJob) -> Outcome | None:
        """The outcome of a job that is done; None where nobody wants to know, or a restore still reads its pages."""
        with self.place.lock:
            if job.readers:
                return None
            self._jobs.remove(job)
            job.told = True
            kept = self._holdings.kept.get(job.entry_id)
            if kept is None or kept.job is not job:  # removed meanwhile
                self._give_back(job)
                return None
            if not job.error:
                kept.job = None
                self._give_back(job)
                kind: Literal["stored", "adopted"] = "adopted" if isinstance(job, AdoptJob) else "stored"
                return Outcome(kind, kept.entry, job.nbytes, job.parts, job.seconds)
            _, free = self._holdings.remove(job.entry_id)
            self._drop([self.place.manifest_path(job.entry_id)], free)
            pages = self._give_back(job, keep=True)
            seconds = job.seconds
        if isinstance(job, AdoptJob) and job.damaged is not None:
            job.source_level.restorer.condemn(*job.damaged)
        return Outcome("failed", kept.entry, 0, 0, seconds, job.error, pages)

    @staticmethod
    def _give_back(job: StoreJob, keep: bool = False) -> HeldPages | None:
        """Let go of a job's pages; ``keep``: hand them out instead."""
        source, job.source = job.source, None
        if source is None:
            return None
        pages = source.pages.fork(source.pages.tokens) if keep else None
        source.release()
        return pages

    def _drop(self, manifests: Sequence[Path], parts: Sequence[Part]) -> None:
        self._writer.submit(DropJob(self.place, manifests, [self.place.segment_path(part) for part in parts]))

    def _rewrite(self, entry_id: str) -> None:
        """Have an entry's manifest written again, unless that is queued already."""
        self._rewrites = {key: job for key, job in self._rewrites.items() if not job.done}
        if entry_id not in self._rewrites or self._rewrites[entry_id].started:
            self._rewrites[entry_id] = ManifestJob(self.place, entry_id)
            self._writer.submit(self._rewrites[entry_id])
