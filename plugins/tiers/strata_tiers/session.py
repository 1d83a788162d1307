"""Session files: one conversation, complete in one file. Export, import and saving a slot use them; see
``docs/format.md``."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs

from strata_core.errors import DamagedEntry, LevelError
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry
from strata_tiers import manifest, segment
from strata_tiers.cut import Limits, plan
from strata_tiers.files import Files
from strata_tiers.layout import TEMPORARY, VERSION, BadFile, Shape, UnknownVersion, checksum, rounded
from strata_tiers.manifest import Manifest
from strata_tiers.pages import source_of
from strata_tiers.reader import Read, Reader

MAGIC = b"STRATSES"
_START = struct.Struct("<8sII")
_ROW = struct.Struct("<QQ")
_TABLE = 32
#: More files in a session than this are not believed.
_MOST = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def no_progress(done: int, total: int) -> None:
    """For callers that do not want to know."""


def offsets(sizes: list[int]) -> tuple[list[int], int]:
    """Where members of these sizes are in a session file, and the size of all of it."""
    at, places = rounded(_TABLE + _ROW.size * len(sizes)), []
    for size in sizes:
        places.append(at)
        at = rounded(at + size)
    return places, places[-1] + sizes[-1]


def table(sizes: list[int]) -> bytes:
    """The bytes before the first member."""
    places, _ = offsets(sizes)
    start = _START.pack(MAGIC, VERSION, len(sizes))
    rows = b"".join(_ROW.pack(place, size) for place, size in zip(places, sizes, strict=True))
    rows = rows.ljust(rounded(_TABLE + len(rows)) - _TABLE, b"\0")
    return start + checksum(start, rows) + rows


def save(
    path: Path, entry: Entry, parts: Mapping[str, str], pages: HeldPages, progress: Progress = no_progress
) -> int:
    """Write a conversation to a session file and return when it is durable. Called by the engine thread.

    :param parts: of the identity. :param pages: the entry's; they are only read.
    :returns: the size of the file.
    :raises LevelError: it could not be written; what was at ``path`` before is still there.
    """
    shape = Shape(pages.pools[0].layout.page_tokens, tuple(pool.layout.nbytes for pool in pages.pools))
    pieces = plan(entry, shape, Limits(), lambda parent: ())
    data = manifest.encode(entry, parts, pieces, shape.page_tokens)
    sizes = [len(data), *(piece.size for piece in pieces)]
    places, total = offsets(sizes)
    source = source_of(pages)
    files, done = Files(), 0
    try:
        with NewFile(files, path, total) as fd:
            for piece, place in zip(pieces, places[1:], strict=True):
                for _ in segment.write(files, fd, place, piece, entry, shape, source.take):
                    progress(done, total)
                done += piece.size
            files.write(fd, [data], places[0])
            files.write(fd, [table(sizes)], 0)
    except OSError as error:
        raise LevelError(f"{path.name} could not be written: {error.strerror or error}") from error
    finally:
        source.release()
    progress(total, total)
    return total


class Session:
    """An open session file, its table and manifest verified. Close it, or use it as a context.

    :raises LevelError: it cannot be opened. :raises DamagedEntry: it is damaged, or no session file.
    """

    def __init__(self, path: Path, files: Files | None = None):
        self._files = files or Files()
        self.path = path
        try:
            self._fd = self._files.open(path)
        except OSError as error:
            raise LevelError(f"{path.name} cannot be opened: {error.strerror or error}") from error
        try:
            self.rows = self._table()
            self.manifest = self._manifest()
        except (BadFile, OSError) as error:
            self.close()
            raise DamagedEntry(f"{path.name} is no sound session file: {error}") from error

    @property
    def size(self) -> int:
        return self.rows[-1][0] + self.rows[-1][1]

    def load(self, tokens: int, sink: PageSink, progress: Progress = no_progress) -> None:
        """Fill a sink with the pages of the first ``tokens`` positions, verified. See ``Level.load``.

        :raises DamagedEntry: the file is not what was written, or of pages of another size.
        """
        shape = Shape(sink.pools[0].layout.page_tokens, tuple(pool.layout.nbytes for pool in sink.pools))
        if shape.page_tokens != self.manifest.page_tokens:
            raise DamagedEntry(f"{self.path.name} has pages of {self.manifest.page_tokens} tokens")
        reader = Reader(self._files)
        try:
            for number, piece in enumerate(self.manifest.pieces):
                if piece.start < tokens:
                    self._load(number, shape, sink, reader)
                    progress(self.rows[number + 1][0], self.size)
        except (BadFile, OSError) as error:
            raise DamagedEntry(f"{self.path.name} is damaged: {error}") from error
        finally:
            reader.close()

    def read(self, number: int, buffers: list[memoryview], offset: int) -> None:
        """Bytes of member ``number``, from ``offset`` of it on."""
        self._files.read(self._fd, buffers, self.rows[number][0] + offset)

    def verify(self, number: int) -> segment.Header:
        """Header of segment ``number``, compared with the manifest. :raises BadFile: it is another one, or damaged."""
        entry, piece = self.manifest.entry, self.manifest.pieces[number]
        place, size = self.rows[number + 1]
        header = segment.read(self._files, self._fd, place, size)
        segment.expect(header, piece, entry.identity, entry.tokens[piece.start : piece.stop], None)
        return header

    def close(self) -> None:
        self._files.close(self._fd)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _load(self, number: int, shape: Shape, sink: PageSink, reader: Reader) -> None:
        header = self.verify(number)
        if header.shape != shape:
            raise BadFile("its pages have another size")
        place, pools = self.rows[number + 1][0], len(shape.page_bytes)
        first = header.start // shape.page_tokens
        reads = [
            Read(
                self._fd,
                place + header.data + block * shape.block_bytes,
                sink.buffers(first + block),
                header.digests[block * pools : (block + 1) * pools],
            )
            for block in range(min(shape.blocks(header.count), sink.blocks - first))
        ]
        bad = reader.fill(reads)
        if bad is not None:
            raise BadFile(bad[1])
        for block in range(len(reads)):
            sink.filled(first + block)

    def _table(self) -> list[tuple[int, int]]:
        length = self._files.length(self._fd)
        start = bytearray(_TABLE)
        if length < _TABLE:
            raise BadFile("it is too short")
        self._files.read(self._fd, [start], 0)
        magic, version, count = _START.unpack_from(start)
        if magic != MAGIC:
            raise BadFile("it is no session file")
        if version != VERSION:
            raise UnknownVersion(f"its version is {version}")
        end = rounded(_TABLE + _ROW.size * count)
        if not 2 <= count <= _MOST or end > length:
            raise BadFile("its table does not fit its size")
        rows = bytearray(end - _TABLE)
        self._files.read(self._fd, [rows], _TABLE)
        if checksum(bytes(start[: _START.size]), bytes(rows)) != bytes(start[_START.size :]):
            raise BadFile("its table's checksum does not fit")
        found = [_ROW.unpack_from(rows, _ROW.size * number) for number in range(count)]
        places, total = offsets([size for _, size in found])
        if [place for place, _ in found] != places or total != length:
            raise BadFile("its table does not fit its size")
        return found

    def _manifest(self) -> Manifest:
        data = bytearray(self.rows[0][1])
        self._files.read(self._fd, [data], self.rows[0][0])
        found = manifest.parse(bytes(data), None)
        if [size for _, size in self.rows[1:]] != [piece.size for piece in found.pieces]:
            raise BadFile("its manifest names other segments")
        return found


@attrs.define
class NewFile:
    """A file that gets its name when the block ends well, durable; else nothing of it stays."""

    files: Files
    path: Path
    nbytes: int
    temporary: Path = attrs.field(init=False)
    fd: int = attrs.field(init=False)

    def __enter__(self) -> int:
        self.temporary = self.path.with_name(TEMPORARY + secrets.token_hex(8))
        self.fd = self.files.create(self.temporary)
        try:
            self.files.reserve(self.fd, self.nbytes)
        except OSError:
            self._undo()
            raise
        return self.fd

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._undo()
            return
        try:
            self.files.sync(self.fd)
        except OSError:
            self._undo()
            raise
        self.files.close(self.fd)
        self.files.rename(self.temporary, self.path)
        self.files.sync_folder(self.path.parent)

    def _undo(self) -> None:
        self.files.close(self.fd)
        with suppress(OSError):
            self.files.unlink(self.temporary)

