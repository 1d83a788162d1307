"""Taking an entry over from another disk level, without passing through the engine's memory."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strata_core.store.base import Entry
from strata_tiers import segment
from strata_tiers.files import Files
from strata_tiers.holdings import Part
from strata_tiers.jobs import GivenUp, StoreJob, Temporary
from strata_tiers.layout import BadFile, Piece, Shape
from strata_tiers.place import Place
from strata_tiers.reader import Read, Reader

if TYPE_CHECKING:
    from strata_tiers.level import DiskLevel


class AdoptJob(StoreJob):
    """Takes an entry over from another level: by a second name for each segment file, or by copying and verifying.

    Segments that are cut elsewhere on the other level are put together from its pages.
    """

    kind = "adopt"

    def __init__(self, place: Place, entry: Entry, source_level: DiskLevel):
        super().__init__(place, entry, None, 0)
        self.source_level = source_level
        self.damaged: tuple[Part, str] | None = None

    def write_part(self, part: Part, entry: Entry) -> None:
        place, theirs = self.place, self.source_level.place
        with theirs.lock:
            found = theirs.holdings.part(part.piece.name)
            if found is None or not found.settled:
                found = None
                others = self._others(part.piece)
        if found is None:
            self._assemble(others, part, entry)
            return
        path = theirs.segment_path(found)
        final = place.segment_path(part)
        temporary = Temporary(place.directory.temporary(final), final, part.charge, None, part)
        try:
            place.files.link(path, temporary.path)
        except FileNotFoundError:
            raise
        except OSError:  # another volume, or one without links
            self._copy(path, found, part, entry)
            return
        self.remember(temporary)
        with place.lock:
            part.temporary = temporary.path

    def _copy(self, path: Path, found: Part, part: Part, entry: Entry) -> None:
        temporary = self.begin(self.place.segment_path(part), part.piece.size, part)
        assert temporary.fd is not None
        try:
            copy_verified(self.place.files, path, temporary.fd, part.piece, entry, self.place.shape)
        except BadFile as error:
            self.damaged = (found, str(error))
            raise
        with self.place.lock:
            part.temporary = temporary.path

    def _others(self, piece: Piece) -> list[Part]:
        """Segments of the other level that have all of a segment which was cut elsewhere there; with its lock held.

        What this level has already of the entry's beginning decides where the rest is cut.
        """
        theirs = self.source_level.place
        kept = theirs.holdings.kept.get(self.entry_id)
        parts = [] if kept is None or piece.state else [part for part in kept.parts if not part.piece.state]
        parts = [part for part in parts if part.piece.start < piece.stop and piece.start < part.piece.stop]
        if not parts or parts[-1].piece.stop < piece.stop or not all(part.settled for part in parts):
            raise OSError(errno.ENOENT, f"level {theirs.name} does not have all of the entry")
        return parts

    def _assemble(self, others: list[Part], part: Part, entry: Entry) -> None:
        """Write a segment from those that have its pages on the other level."""
        temporary = self.begin(self.place.segment_path(part), part.piece.size, part)
        assert temporary.fd is not None
        files, source = self.place.files, Assembly(self.source_level.place, others, entry)
        try:
            for _ in segment.write(files, temporary.fd, part.piece, entry, self.place.shape, source.block):
                if self.cancelled:
                    raise GivenUp
        except BadFile as error:
            self.damaged = (source.part, str(error))
            raise
        finally:
            source.close()
        with self.place.lock:
            part.temporary = temporary.path


class Assembly:
    """The blocks of an entry from consecutive segments of a level, each page verified.

    :ivar part: the segment that was read last.
    """

    def __init__(self, place: Place, parts: Sequence[Part], entry: Entry):
        self.part = parts[0]
        self._place = place
        self._parts = parts
        self._entry = entry
        self._reader = Reader(place.files, 1)
        self._fd: int | None = None
        self._header: segment.Header | None = None

    def block(self, number: int) -> tuple[np.ndarray, ...]:
        """One uint8 array per pool.

        :param number: of the block, from position 0 of the sequence.
        :raises BadFile: what has it is damaged. :raises OSError: it cannot be read.
        """
        shape = self._place.shape
        position = number * shape.page_tokens
        if self._header is None or position >= self.part.piece.stop:
            self._open(next(part for part in self._parts if part.piece.start <= position < part.piece.stop))
        assert self._fd is not None
        assert self._header is not None
        at, pools = number - self.part.piece.start // shape.page_tokens, len(shape.page_bytes)
        buffers = tuple(np.empty(nbytes, np.uint8) for nbytes in shape.page_bytes)
        digests = self._header.digests[at * pools : (at + 1) * pools]
        bad = self._reader.fill([Read(self._fd, self._header.data + at * shape.block_bytes, buffers, digests)])
        if bad is not None:
            raise BadFile(f"block {at}: {bad[1]}")
        return buffers

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._place.files.close(fd)

    def _open(self, part: Part) -> None:
        self.close()
        self.part, piece = part, part.piece
        self._fd = self._place.files.open(self._place.segment_path(part))
        self._header = segment.read(self._place.files, self._fd)
        ids = self._entry.tokens[piece.start : piece.stop]
        segment.expect(self._header, piece, self._entry.identity, ids, self._place.shape)


def copy_verified(files: Files, path: Path, fd: int, piece: Piece, entry: Entry, shape: Shape) -> None:
    """Copy a segment file page by page, each verified.

    :raises BadFile: it is damaged, or not the segment it should be.
    """
    source = files.open(path)
    reader = Reader(files, 1)
    try:
        header = segment.read(files, source)
        segment.expect(header, piece, entry.identity, entry.tokens[piece.start : piece.stop], shape)
        shape = shape.of(piece)
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
