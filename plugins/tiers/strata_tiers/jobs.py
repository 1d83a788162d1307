"""What the writer does for a level: store an entry, take one over, change a manifest, delete files.

A job of storing goes through four steps, and many jobs go through each together: :meth:`StoreJob.write` (temporary files),
sync, :meth:`StoreJob.publish_segments`, :meth:`StoreJob.publish_manifest`. After any error :meth:`StoreJob.abandon` takes
back what has no final name yet. Everything here runs on the writer's thread unless it says otherwise.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs
import numpy as np
from xxhash import xxh3_128_digest

from strata_core.store.base import Entry
from strata_tiers import manifest, segment
from strata_tiers.directory import Directory
from strata_tiers.files import Files
from strata_tiers.holdings import Holdings, Kept, Part
from strata_tiers.layout import FOLDER_BYTES, BadFile, Shape, charge, manifest_name
from strata_tiers.pages import PageSource
from strata_tiers.reader import Read, Reader

if TYPE_CHECKING:
    from strata_tiers.level import DiskLevel

#: Blocks are written in runs of about this size; each run is hashed while it is being written.
RUN_BYTES = 1 << 20


class Again(Exception):
    """Something this job relied on is gone; it must go through its steps once more."""


class GivenUp(Exception):
    """The entry is not wanted any more."""


@attrs.define(eq=False)
class Place:
    """What a level and its jobs share.

    :ivar lock: guards ``holdings`` and the fields here; never held during a call to the system that may take long.
    :ivar physical: charge of the files that are on the disk now.
    :ivar drops: jobs that will delete files.
    :ivar garbage: files that no entry needs and that may go when room is needed, with their charge.
    """

    name: str
    files: Files
    directory: Directory
    holdings: Holdings
    max_bytes: int
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    physical: int = 0
    drops: int = 0
    garbage: dict[Path, int] = attrs.field(factory=dict)

    @property
    def shape(self) -> Shape:
        return self.holdings.shape

    def segment_path(self, part: Part) -> Path:
        return self.directory.segments / part.piece.name

    def manifest_path(self, entry_id: str) -> Path:
        return self.directory.conversations / manifest_name(entry_id)

    def account(self, nbytes: int) -> None:
        with self.lock:
            self.physical += nbytes

    def gone(self, path: Path) -> None:
        """A file is no garbage any more: it was deleted or overwritten."""
        with self.lock:
            self.holdings.others -= self.garbage.pop(path, 0)

    def recount(self) -> None:
        """Look at what is really on the disk: others may have deleted files."""
        total = self.directory.charge() - FOLDER_BYTES
        with self.lock:
            self.physical = total

    def relief(self) -> bool:
        """Whether room will come without anything new being decided."""
        with self.lock:
            return self.drops > 0 or any(kept.leaving for kept in self.holdings.kept.values())


@attrs.define(eq=False)
class _Temporary:
    path: Path
    final: Path
    charge: int
    fd: int | None = None
    part: Part | None = None


class Job:
    """:ivar weight: bytes that it keeps waiting in memory. :ivar done: nothing is left to do, well or not."""

    kind: ClassVar[str]

    def __init__(self, place: Place, weight: int = 0):
        self.place = place
        self.weight = weight
        self.done = False
        self.forced = False

    def ready(self) -> bool:
        """Whether it can go on; one that cannot is passed over for now."""
        return True


class DropJob(Job):
    """Deletes files: manifests, then, after a sync, segments and others."""

    kind = "drop"

    def __init__(self, place: Place, manifests: Iterable[Path], others: Iterable[Path]):
        super().__init__(place)
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
        super().__init__(place, weight)
        self.entry_id = entry_id
        self.error = ""
        self.written = False
        self.cancelled = False
        self.tries = 0
        self.nbytes = 0
        self.parts = 0
        self.started = 0.0
        self.seconds = 0.0
        self._temporaries: list[_Temporary] = []
        self._encoded: list[Part] = []

    def kept(self) -> Kept | None:
        """The entry, unless it is not this job's any more. With the lock held."""
        kept = self.place.holdings.kept.get(self.entry_id)
        if kept is None or (kept.job is not None and (kept.job.error or not kept.job.done)):
            return None  # the job that stores it will write the manifest
        return kept

    def write(self, helper: Executor) -> None:
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

    def begin(self, final: Path, nbytes: int, part: Part | None) -> _Temporary:
        """A new temporary file; there is room for it."""
        place = self.place
        free = place.files.free_bytes(place.directory.root)
        if free is not None and free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = _Temporary(place.directory.temporary(final), final, charge(nbytes), None, part)
        temporary.fd = place.files.create(temporary.path)
        self._temporaries.append(temporary)
        place.account(temporary.charge)
        self.nbytes += nbytes
        return temporary

    def _rename(self, temporary: _Temporary) -> None:
        self._close(temporary)
        replaced = self.place.files.length_of(temporary.final)
        self.place.files.rename(temporary.path, temporary.final)
        self._temporaries.remove(temporary)
        if replaced is not None:
            self.place.account(-charge(replaced))
            self.place.gone(temporary.final)

    def _close(self, temporary: _Temporary) -> None:
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

    def kept(self) -> Kept | None:
        kept = self.place.holdings.kept.get(self.entry_id)
        return kept if kept is not None and kept.job is self else None

    def ready(self) -> bool:
        """Whether it fits, or nothing will make it fit."""
        return self.forced or self.cancelled or self.fits() or not self.place.relief()

    def fits(self) -> bool:
        place = self.place
        with place.lock:
            kept = self.kept()
            if kept is None:
                return True
            need = kept.charge + sum(p.charge for p in kept.parts if not p.settled and p.temporary is None)
            return place.physical + FOLDER_BYTES + need <= place.max_bytes

    def write(self, helper: Executor) -> None:
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
        for part in missing:
            self.write_part(part, kept.entry, helper)
            self.parts += 1
        self.write_manifest()
        self.written = True

    def stage(self, missing: list[Part]) -> None:
        if self.source is not None:
            self.source.stage([number for part in missing for number in self._blocks(part)])

    def write_part(self, part: Part, entry: Entry, helper: Executor) -> None:
        if self.source is None:
            raise OSError(errno.ENODATA, "the entry's pages were given back before it was safe")
        place, piece = self.place, part.piece
        temporary = self.begin(place.segment_path(part), piece.size, part)
        assert temporary.fd is not None
        offset, digests = place.shape.header_bytes(piece.count), list[bytes]()
        for run in self._runs(part):
            nbytes = sum(buffer.nbytes for buffer in run)
            # Two threads read the same memory while it is in cache: one hashes it, one copies it to the page cache.
            hashed = helper.submit(_digests, run) if nbytes >= RUN_BYTES // 4 else None
            try:
                place.files.write(temporary.fd, run, offset)
            finally:
                digests += hashed.result() if hashed is not None else _digests(run)
            offset += nbytes
            if self.cancelled:
                raise GivenUp
        ids = entry.tokens[piece.start : piece.stop]
        header = segment.encode(piece, entry.identity, ids, place.shape, digests)
        place.files.write(temporary.fd, [header], 0)
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

    def _blocks(self, part: Part) -> range:
        first = part.piece.start // self.place.shape.page_tokens
        return range(first, first + self.place.shape.blocks(part.piece.count))

    def _runs(self, part: Part) -> Iterator[list[np.ndarray]]:
        """The pages of a segment in the order of the file, in runs that are written at once."""
        assert self.source is not None
        run: list[np.ndarray] = []
        for number in self._blocks(part):
            run.extend(self.source.block(number))
            if sum(buffer.nbytes for buffer in run) >= RUN_BYTES:
                yield run
                run = []
        if run:
            yield run


class AdoptJob(StoreJob):
    """Takes an entry over from another level: by a second name for each segment file, or by copying and verifying."""

    kind = "adopt"

    def __init__(self, place: Place, entry: Entry, source_level: DiskLevel):
        super().__init__(place, entry, None, 0)
        self.source_level = source_level
        self.damaged: tuple[Part, str] | None = None

    def write_part(self, part: Part, entry: Entry, helper: Executor) -> None:
        place, theirs = self.place, self.source_level.place
        with theirs.lock:
            found = theirs.holdings.part(part.piece.name)
            if found is None or not found.settled:
                raise OSError(errno.ENOENT, f"level {theirs.name} does not have all of the entry")
        path = theirs.segment_path(found)
        final = place.segment_path(part)
        temporary = _Temporary(place.directory.temporary(final), final, part.charge, None, part)
        try:
            place.files.link(path, temporary.path)
        except FileNotFoundError:
            raise
        except OSError:  # another volume, or one without links
            self._copy(path, found, part, entry)
            return
        self._temporaries.append(temporary)
        place.account(temporary.charge)
        with place.lock:
            part.temporary = temporary.path

    def _copy(self, path: Path, found: Part, part: Part, entry: Entry) -> None:
        temporary = self.begin(self.place.segment_path(part), part.piece.size, part)
        assert temporary.fd is not None
        try:
            copy_verified(self.place.files, path, temporary.fd, part, entry, self.place.shape)
        except BadFile as error:
            self.damaged = (found, str(error))
            raise
        with self.place.lock:
            part.temporary = temporary.path


def copy_verified(files: Files, path: Path, fd: int, part: Part, entry: Entry, shape: Shape) -> None:
    """Copy a segment file page by page, each verified.

    :raises BadFile: it is damaged, or not the segment it should be.
    """
    source = files.open(path)
    reader = Reader(files, 1)
    try:
        header = segment.read(files, source)
        piece = part.piece
        segment.expect(header, piece, entry.identity, entry.tokens[piece.start : piece.stop], shape)
        head = bytearray(header.data)
        files.read(source, [head], 0)
        pools = len(shape.page_bytes)
        buffers = tuple(np.empty(nbytes, np.uint8) for nbytes in shape.page_bytes)
        for number in range(shape.blocks(piece.count)):
            offset = header.data + number * shape.block_bytes
            digests = header.digests[number * pools : (number + 1) * pools]
            bad = reader.fill([Read(source, offset, buffers, digests)])
            if bad is not None:
                raise BadFile(f"block {number}: {bad[1]}")
            files.write(fd, buffers, offset)
        files.write(fd, [head], 0)
    finally:
        files.close(source)


def _digests(run: list[np.ndarray]) -> list[bytes]:
    return [xxh3_128_digest(page) for page in run]
