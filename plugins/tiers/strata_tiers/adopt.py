"""Taking an entry over from another disk level, without passing through the engine's memory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strata_core.store.base import Entry
from strata_tiers import segment
from strata_tiers.files import Files
from strata_tiers.holdings import Part
from strata_tiers.jobs import StoreJob, Temporary
from strata_tiers.layout import BadFile, Piece, Shape
from strata_tiers.place import Place
from strata_tiers.reader import Read, Reader

if TYPE_CHECKING:
    from strata_tiers.level import DiskLevel


class AdoptJob(StoreJob):
    """Takes an entry over from another level: by a second name for each segment file, or by copying and verifying."""

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
                raise OSError(errno.ENOENT, f"level {theirs.name} does not have all of the entry")
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
