"""Looks after a level's folder without an engine: list, check, repair, remove, prune.

What changes the folder takes its lock, and fails with a LevelError while a server uses it. What only reads does not;
files that a server deletes meanwhile can then be reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from strata_core.errors import LevelError, NotFound
from strata_tiers import manifest, segment
from strata_tiers.directory import Directory, Scan
from strata_tiers.files import Files
from strata_tiers.layout import BadFile, Piece, UnknownVersion, manifest_name, sound
from strata_tiers.manifest import Manifest
from strata_tiers.newfile import NewFile, Progress, no_progress
from strata_tiers.reader import Read, Reader
from strata_tiers.scanning import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Segments of up to this size are read at once.
SMALL_BYTES = 1 << 20


@attrs.frozen
class Problem:
    """:ivar path: the file; :ivar why: what is wrong; :ivar done: what repairing did about it, empty without."""

    path: Path
    why: str
    done: str = ""


@attrs.define
class Report:
    """What a check found.

    :ivar nbytes: charge of the whole folder, as it counts against a budget.
    :ivar damaged: manifests and segments that are not what was written.
    :ivar clutter: what a crash left: temporary files, segments that no manifest names.
    :ivar unknown: files of versions that this program does not know.
    """

    conversations: int = 0
    segments: int = 0
    nbytes: int = 0
    quarantined: int = 0
    unknown: int = 0
    damaged: list[Problem] = attrs.field(factory=list)
    clutter: list[Problem] = attrs.field(factory=list)

    @property
    def sound(self) -> bool:
        """Nothing is damaged; clutter does no harm."""
        return not self.damaged


def entries(folder: Path) -> list[Manifest]:
    """All sound manifests, of any identity, the latest used first.

    :raises LevelError: there is no such folder.
    """
    scan = Directory(folder, Files(), read_only=True).scan(None)
    return sorted(scan.manifests, key=lambda found: found.entry.used, reverse=True)


def check(folder: Path, *, repair: bool = False, payloads: bool = True, progress: Progress = no_progress) -> Report:
    """Verify everything in a folder.

    :param repair: put what is damaged into quarantine, cut conversations to what is sound, delete clutter.
    :param payloads: read and verify all pages too, not only headers.
    :raises LevelError: there is no such folder; or a server uses it, and it shall be repaired.
    """
    files = Files()
    directory = Directory(folder, files, read_only=not repair)
    try:
        scan = directory.scan(None)
        check = _Check(directory, files, scan, payloads, progress)
        check.run()
        if repair:
            check.repair()
        return check.report
    finally:
        directory.close()


def find(folder: Path, entry_id: str) -> Manifest:
    """:raises NotFound: no sound entry of this id is in the folder."""
    directory = Directory(folder, Files(), read_only=True)
    path = directory.conversations / manifest_name(entry_id)
    try:
        return directory.read_manifest(path, entry_id)
    except (BadFile, OSError) as error:
        raise NotFound(f"conversation {entry_id!r} is not in {folder}: {error}") from error


def remove_entry(folder: Path, entry_id: str) -> int:
    """Delete an entry, and the segments that only it names. Returns the bytes that were freed.

    :raises NotFound: there is no such entry. :raises LevelError: a server uses the folder.
    """
    find(folder, entry_id)
    with _held(folder) as (files, directory):
        return _delete(files, directory, [directory.conversations / manifest_name(entry_id)])


def prune_foreign(folder: Path, keep: Iterable[bytes], *, progress: Progress = no_progress) -> int:
    """Delete entries of other identities. Returns how many there were.

    :param keep: identity digests, tenants' included, whose entries stay.
    :raises LevelError: a server uses the folder.
    """
    kept = set(keep)
    with _held(folder) as (files, directory):
        scan = directory.scan(None)
        sound = [*scan.manifests, *(found for found, _ in scan.cut)]
        going = [found.entry.id for found in sound if found.entry.identity not in kept]
        progress(0, len(going))
        _delete(files, directory, [directory.conversations / manifest_name(entry_id) for entry_id in going])
        progress(len(going), len(going))
        return len(going)


@contextmanager
def _held(folder: Path) -> Iterator[tuple[Files, Directory]]:
    if not folder.is_dir():
        raise LevelError(f"{folder} is no folder")
    files = Files()
    directory = Directory(folder, files)
    try:
        yield files, directory
    finally:
        directory.close()


def _delete(files: Files, directory: Directory, manifests: list[Path]) -> int:
    """Delete manifests, then the segments that became orphans by it. Returns the charge of all."""
    before = directory.scan(None)
    for path in manifests:
        files.unlink(path)
    files.sync_folder(directory.conversations)
    for path in directory.scan(None).orphans.keys() - before.orphans.keys():
        files.unlink(path)
    return before.nbytes - directory.charge()


class _Check:
    """One pass over a folder."""

    def __init__(self, directory: Directory, files: Files, scan: Scan, payloads: bool, progress: Progress):
        self.report = Report(nbytes=scan.nbytes, quarantined=len(scan.quarantined))
        self._directory = directory
        self._files = files
        self._scan = scan
        self._payloads = payloads
        self._progress = progress
        self._bad: dict[str, int] = {}  # name of a damaged segment -> number in report.damaged
        self._verified: set[str] = set()

    def run(self) -> None:
        report, scan = self.report, self._scan
        report.conversations = len(scan.manifests) + len(scan.cut)
        report.unknown = len(scan.foreign)
        report.damaged += [Problem(path, why) for path, why in scan.stale.items()]
        report.clutter += [Problem(path, "a temporary file") for path in scan.leftovers]
        report.clutter += [Problem(path, "no manifest names it") for path in scan.unclaimed]
        pairs = [(found, piece) for found in scan.manifests for piece in found.pieces]
        pairs += [(found, piece) for found, pieces in scan.cut for piece in pieces]
        done, total = 0, sum(piece.size for _, piece in pairs)
        for found, piece in pairs:
            if piece.name not in self._verified:
                self._verified.add(piece.name)
                self._look(found, piece)
            done += piece.size
            self._progress(done, total)
        report.segments = len(self._verified)

    def _look(self, found: Manifest, piece: Piece) -> None:
        path = self._directory.segments / piece.name
        try:
            _verify(self._files, path, piece, found, payloads=self._payloads)
        except UnknownVersion:
            self.report.unknown += 1
        except (BadFile, OSError) as error:
            self._bad[piece.name] = len(self.report.damaged)
            self.report.damaged.append(Problem(path, str(error)))

    def repair(self) -> None:
        """Act on what was found: manifests first, so that none names what has gone."""
        report, directory, files = self.report, self._directory, self._files
        for found, there in (*((found, found.pieces) for found in self._scan.manifests), *self._scan.cut):
            left = sound(there, self._bad)
            if len(left) < len(found.pieces):
                self._cut(found, left)
        files.sync_folder(directory.conversations)
        for number, problem in enumerate(report.damaged):
            if problem.path.parent == directory.segments or problem.path in self._scan.unusable:
                with _reported(report, number, problem, "in quarantine"):
                    files.rename(problem.path, directory.quarantined(problem.path))
        for path in directory.scan(None).unclaimed.keys() | self._scan.leftovers.keys():
            files.unlink(path)
        report.clutter = [attrs.evolve(problem, done="deleted") for problem in report.clutter]
        report.nbytes = directory.charge()
        report.quarantined = len(directory.scan(None).quarantined)

    def _cut(self, found: Manifest, pieces: Sequence[Piece]) -> None:
        """Write a manifest again that names only these segments and states, or none at all."""
        path = self._directory.conversations / manifest_name(found.entry.id)
        done = "the conversation is gone"
        if pieces:
            entry = shortened(found.entry, pieces, found.page_tokens)
            data = manifest.encode(entry, found.parts, pieces, found.page_tokens)
            with NewFile(self._files, path, len(data)) as fd:
                self._files.write(fd, [data], 0)
            done = f"the conversation ends after {len(entry.tokens)} tokens"
        else:
            self._files.rename(path, self._directory.quarantined(path))
            self.report.conversations -= 1
        for number, problem in enumerate(self.report.damaged):
            if problem.path == path:
                self.report.damaged[number] = attrs.evolve(problem, done=done)


@contextmanager
def _reported(report: Report, number: int, problem: Problem, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        done = f"could not be repaired: {error.strerror or error}"
    report.damaged[number] = attrs.evolve(problem, done=done)


def _verify(files: Files, path: Path, piece: Piece, found: Manifest, *, payloads: bool) -> None:
    """:raises BadFile: the segment is not what was written. :raises OSError: it cannot be read."""
    entry = found.entry
    ids = entry.tokens[piece.start : piece.stop]
    if payloads and piece.size <= SMALL_BYTES:
        data = files.load(path, 2 * SMALL_BYTES)
        header = segment.parse(data, len(data))
        segment.expect(header, piece, entry.identity, ids, None)
        segment.verify_pages(header, data)
        return
    fd = files.open(path)
    try:
        header = segment.read(files, fd)
        segment.expect(header, piece, entry.identity, ids, None)
        if payloads:
            _verify_pages(files, fd, header)
    finally:
        files.close(fd)


def _verify_pages(files: Files, fd: int, header: segment.Header) -> None:
    shape, pools = header.shape, len(header.shape.page_bytes)
    buffers = tuple(np.empty(nbytes, np.uint8) for nbytes in shape.page_bytes)
    reader = Reader(files, 1)
    for block in range(shape.blocks(header.count)):
        offset = header.data + block * shape.block_bytes
        bad = reader.fill([Read(fd, offset, buffers, header.digests[block * pools : (block + 1) * pools])])
        if bad is not None:
            raise BadFile(f"block {block}: {bad[1]}")
