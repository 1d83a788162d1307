"""What the writer does for a level: store an entry, change a manifest, delete files.

A job of storing goes through four steps, and many jobs go through each together: :meth:`StoreJob.write` (temporary
files), sync, :meth:`StoreJob.publish_segments`, :meth:`StoreJob.publish_manifest`. After any error
:meth:`StoreJob.abandon` takes back what has no final name yet. Everything here runs on the writer's thread, or on such
as it waits for.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import attrs

from strata_core.store.base import Entry
from strata_tiers import manifest, segment
from strata_tiers.holdings import Kept, Part
from strata_tiers.layout import FOLDER_BYTES, charge
from strata_tiers.pages import PageSource
from strata_tiers.place import Place

log = logging.getLogger("strata.disk")


#: From so many bytes on, an entry's segments are written two at a time. What one thread writes is bound by copying into
#: the page cache, and by digests; files wait for each other in neither.
SIDE_BY_SIDE_BYTES, SIDE_BY_SIDE = 16 << 20, 2


class Again(Exception):
    """Something this job relied on is gone; it must go through its steps once more."""


class GivenUp(Exception):
    """The entry is not wanted any more."""


@attrs.define(eq=False)
class Temporary:
    """A file without a final name yet; ``part`` is None for a manifest."""

    path: Path
    final: Path
    charge: int
    fd: int | None = None
    part: Part | None = None


class Job:
    """:ivar weight: bytes that it keeps waiting in memory. :ivar done: nothing is left to do, well or not."""

    kind: ClassVar[str]

    def __init__(self, weight: int = 0):
        self.weight = weight
        self.done = False
        self.forced = False

    def ready(self) -> bool:
        """Whether it can go on; one that cannot is passed over for now."""
        return True


class TaskJob(Job):
    """Anything that has to be done in its turn."""

    kind = "task"

    def __init__(self, task: Callable[[], None], weight: int = 0):
        super().__init__(weight)
        self.error = ""
        self._task = task

    def run(self) -> None:
        try:
            self._task()
        except Exception as error:
            self.error = getattr(error, "strerror", None) or str(error) or type(error).__name__
            log.debug("a task of the disk levels failed: %s", self.error, exc_info=error)
        self.done = True


class DropJob(Job):
    """Deletes files: manifests, then, after a sync, segments and others."""

    kind = "drop"

    def __init__(self, place: Place, manifests: Iterable[Path], others: Iterable[Path]):
        super().__init__()
        self.place = place
        self.manifests = list(manifests)
        self.others = list(others)
        with place.lock:
            place.drops += 1

    def unlink(self, paths: list[Path]) -> None:
        """Delete what is there. What cannot be deleted stays accounted for, and is found again at the next start."""
        for path in paths:
            try:
                length = self.place.files.length_of(path)
                self.place.files.unlink(path)
            except FileNotFoundError:
                continue
            except OSError:
                continue
            self.place.account(-charge(length or 0))

    def finish(self) -> None:
        with self.place.lock:
            self.place.drops -= 1
        self.done = True


class ManifestJob(Job):
    """Writes the manifest of an entry as it is now, over the former one."""

    kind = "store"

    def __init__(self, place: Place, entry_id: str, weight: int = 0):
        super().__init__(weight)
        self.place = place
        self.entry_id = entry_id
        self.error = ""
        self.written = False
        self.cancelled = False
        self.tries = 0
        self.nbytes = 0
        self.parts = 0
        self.started = 0.0
        self.seconds = 0.0
        self._temporaries: list[Temporary] = []
        self._encoded: list[Part] = []

    def kept(self) -> Kept | None:
        """The entry, unless it is not this job's any more. With the lock held."""
        kept = self.place.holdings.kept.get(self.entry_id)
        if kept is None or (kept.job is not None and (kept.job.error or not kept.job.done)):
            return None  # the job that stores it will write the manifest
        return kept

    def write(self) -> None:
        """:raises GivenUp: nobody wants it. :raises OSError: it did not work."""
        self.started = self.started or time.perf_counter()
        self.write_manifest()
        self.written = True

    def write_manifest(self) -> None:
        place = self.place
        with place.lock:
            kept = self.kept()
            if kept is None or self.cancelled:
                raise GivenUp
            self._encoded = list(kept.parts)
            pieces = [part.piece for part in kept.parts]
            data = manifest.encode(kept.entry, place.holdings.identity_parts, pieces, place.shape.page_tokens)
        temporary = self.begin(place.manifest_path(self.entry_id), len(data), None)
        assert temporary.fd is not None
        place.files.write(temporary.fd, [data], 0)

    def open_files(self) -> list[int]:
        """What has to be synced."""
        return [temporary.fd for temporary in self._temporaries if temporary.fd is not None]

    def publish_segments(self) -> bool:
        """Give segments their names. Returns whether there were any."""
        return False

    def publish_manifest(self) -> None:
        """:raises Again: a segment it names is not there. :raises GivenUp: nobody wants the entry any more."""
        place = self.place
        with place.lock:
            kept = self.kept()
            if kept is None or self.cancelled:
                raise GivenUp
            if kept.parts != self._encoded or not all(part.settled for part in kept.parts):
                raise Again("a segment is missing")
        [temporary] = [t for t in self._temporaries if t.part is None]
        self._rename(temporary)

    def abandon(self) -> None:
        """Take back what has no final name."""
        for temporary in self._temporaries:
            self._close(temporary)
            with self.place.lock:
                if temporary.part is not None and temporary.part.temporary == temporary.path:
                    temporary.part.temporary = None
            try:
                self.place.files.unlink(temporary.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue  # it stays on the disk, and on the account
            self.place.account(-temporary.charge)
        self._temporaries.clear()

    def finish(self, error: str = "") -> None:
        self.seconds = time.perf_counter() - self.started if self.started else 0.0
        self.error = error
        self.done = True

    def begin(self, final: Path, nbytes: int, part: Part | None) -> Temporary:
        """A new temporary file; there is room for it."""
        place = self.place
        free = place.files.free_bytes(place.directory.root)
        if free is not None and free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = Temporary(place.directory.temporary(final), final, charge(nbytes), None, part)
        temporary.fd = place.files.create(temporary.path)
        self.remember(temporary)
        place.files.reserve(temporary.fd, nbytes)
        with place.lock:  # segments may be written by several threads
            self.nbytes += nbytes
        return temporary

    def remember(self, temporary: Temporary) -> None:
        """Account for a temporary file, and take it along."""
        self._temporaries.append(temporary)
        self.place.account(temporary.charge)

    def _rename(self, temporary: Temporary) -> None:
        self._close(temporary)
        replaced = self.place.files.length_of(temporary.final)
        self.place.files.rename(temporary.path, temporary.final)
        self._temporaries.remove(temporary)
        if replaced is not None:
            self.place.account(-charge(replaced))
            self.place.gone(temporary.final)

    def _close(self, temporary: Temporary) -> None:
        if temporary.fd is not None:
            fd, temporary.fd = temporary.fd, None
            self.place.files.close(fd)


class StoreJob(ManifestJob):
    """Writes an entry from its pages.

    :ivar readers: restores that copy from the pages now; they are not given back meanwhile.
    :ivar told: the coordinator knows what it came to.
    """

    def __init__(self, place: Place, entry: Entry, source: PageSource | None, weight: int):
        super().__init__(place, entry.id, weight)
        self.conversation = entry.conversation
        self.source = source
        self.readers = 0
        self.told = False
        self._broken = False  # one of several segments could not be written

    def kept(self) -> Kept | None:
        kept = self.place.holdings.kept.get(self.entry_id)
        return kept if kept is not None and kept.job is self else None

    def ready(self) -> bool:
        """Whether it fits, or nothing will make it fit. A forced one waits for files that are being deleted only, not
        for what the coordinator has yet to decide."""
        if self.cancelled or self.fits():
            return True
        return not (self.place.drops if self.forced else self.place.relief())

    def fits(self) -> bool:
        place = self.place
        with place.lock:
            kept = self.kept()
            if kept is None:
                return True
            need = kept.charge + sum(p.charge for p in kept.parts if not p.settled and p.temporary is None)
            return place.physical + FOLDER_BYTES + need <= place.max_bytes

    def write(self) -> None:
        self.started = self.started or time.perf_counter()
        with self.place.lock:
            kept = self.kept()
            if kept is None or self.cancelled:
                raise GivenUp
            parts = list(kept.parts)
        if not self.forced and not self.fits():
            self.place.recount()
        if not self.forced and not self.fits():
            raise OSError(errno.ENOSPC, f"level {self.place.name} has no room within its budget")
        missing = [part for part in parts if not self._is_there(part)]
        self.stage(missing)
        self.write_parts(missing, kept.entry)
        self.parts += len(missing)
        self.write_manifest()
        self.written = True

    def stage(self, missing: list[Part]) -> None:
        if self.source is not None:
            shape = self.place.shape
            self.source.stage([number for part in missing for number in self.source.numbers(part.piece, shape)])

    def write_parts(self, missing: list[Part], entry: Entry) -> None:
        self._broken = False
        many = len(missing) > 1 and sum(part.piece.size for part in missing) >= SIDE_BY_SIDE_BYTES
        if not many or self.source is None or not self.source.any_order:
            for part in missing:
                self.write_part(part, entry)
            return
        with ThreadPoolExecutor(SIDE_BY_SIDE, "strata-disk") as pool:
            running = [pool.submit(self._write_beside, part, entry) for part in missing]
        errors = [error for error in (done.exception() for done in running) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, GivenUp)):
            raise error  # rather the reason than that another segment was not written because of it

    def _write_beside(self, part: Part, entry: Entry) -> None:
        try:
            self.write_part(part, entry)
        except BaseException:
            self._broken = True
            raise

    def write_part(self, part: Part, entry: Entry) -> None:
        if self.source is None:
            raise OSError(errno.ENODATA, "the entry's pages were given back before it was safe")
        place, piece = self.place, part.piece
        temporary = self.begin(place.segment_path(part), piece.size, part)
        assert temporary.fd is not None
        for _ in segment.write(place.files, temporary.fd, piece, entry, place.shape, self.source.reader(piece)):
            if self.cancelled or self._broken:
                raise GivenUp
        with place.lock:
            part.temporary = temporary.path

    def publish_segments(self) -> bool:
        mine = [temporary for temporary in self._temporaries if temporary.part is not None]
        for temporary in mine:
            assert temporary.part is not None
            with self.place.lock:
                if self.cancelled:
                    raise GivenUp
            self._rename(temporary)
            with self.place.lock:
                temporary.part.settled = True
                temporary.part.temporary = None
        return bool(mine)

    def _is_there(self, part: Part) -> bool:
        """Whether a segment is written already, by this or another job. Looks, as somebody may have deleted it."""
        place = self.place
        with place.lock:
            settled, temporary = part.settled, part.temporary
        if settled and place.files.length_of(place.segment_path(part)) != part.piece.size:
            with place.lock:
                part.settled = settled = False
        return settled or temporary is not None
