"""The header of a segment file, see ``docs/format.md``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
from xxhash import xxh3_128_digest

from strata_core.conversations.identity import DIGEST_BYTES
from strata_core.store.base import Entry
from strata_tiers.files import Files
from strata_tiers.layout import (
    SEGMENT_HEAD,
    VERSION,
    BadFile,
    Piece,
    Shape,
    UnknownVersion,
    checksum,
    page_digest,
    rounded,
)

MAGIC = b"STRATSEG"
_START = struct.Struct("<8sII")
_REST = struct.Struct("<16s16s16sQIIIIQQQQ")
_PARTIAL = 1
#: Blocks are written in runs of about this size; each run is hashed right after, while some of it is in cache. Hashing
#: on a second thread meanwhile was measured, on two cores, to be faster at a load of 3 (90-110 % of the rate of writing
#: alone, from 70-85 %), slower at a load of 7 (65 %, from 95 %), and to take a tenth more of the processor.
RUN_BYTES = 512 << 10


@attrs.frozen(eq=False)
class Header:
    """What a segment says of itself.

    :ivar ids: int32 ids of its positions.
    :ivar digests: of each page, in the order of the file.
    :ivar data: offset of the first block.
    """

    identity: bytes
    parent: bytes
    address: bytes
    start: int
    count: int
    shape: Shape
    ids: np.ndarray
    digests: tuple[bytes, ...]
    data: int
    size: int


def encode(piece: Piece, identity: bytes, ids: np.ndarray, shape: Shape, digests: Sequence[bytes]) -> bytes:
    """All bytes before the data.

    :param digests: of each page, block by block and pool by pool.
    """
    pools, blocks = len(shape.page_bytes), shape.blocks(piece.count)
    ids_at = SEGMENT_HEAD + 8 * pools
    digests_at = ids_at + 4 * piece.count
    data_at = shape.header_bytes(piece.count)
    start = _START.pack(MAGIC, VERSION, _PARTIAL if piece.count % shape.page_tokens else 0)
    rest = _REST.pack(
        identity, piece.parent, piece.address, piece.start, piece.count, shape.page_tokens, pools, blocks,
        ids_at, digests_at, data_at, piece.size,
    )  # fmt: skip
    rest += struct.pack(f"<{pools}Q", *shape.page_bytes)
    rest += np.ascontiguousarray(ids, "<i4").tobytes() + b"".join(digests)
    rest = rest.ljust(data_at - _START.size - DIGEST_BYTES, b"\0")
    return start + checksum(start, rest) + rest


def read(files: Files, fd: int) -> Header:
    """The header of an open segment file, verified.

    :raises BadFile: it is no segment, of an unknown version, or damaged. :raises OSError: it cannot be read.
    """
    length = files.length(fd)
    first = bytearray(min(length, 2 * 4096))
    files.read(fd, [first], 0)
    data_at = data_offset(first)
    if len(first) < min(data_at, length):
        more = bytearray(min(data_at, length) - len(first))
        files.read(fd, [more], len(first))
        first += more
    return parse(bytes(first), length)


def data_offset(first: bytes | bytearray) -> int:
    """Where the data of a segment file begins that begins with these bytes.

    :raises BadFile: it is no segment, or of an unknown version.
    """
    if len(first) < SEGMENT_HEAD or bytes(first[:8]) != MAGIC:
        raise BadFile("not a segment file")
    _, version, _ = _START.unpack_from(first)
    if version != VERSION:
        raise UnknownVersion(f"segment version {version}")
    offset: int = struct.unpack_from("<Q", first, 120)[0]
    return offset


def parse(first: bytes, length: int) -> Header:
    """The header in the first bytes of a segment file of ``length`` bytes, all of it up to the data.

    :raises BadFile: it is no segment, of an unknown version, or damaged.
    """
    data_offset(first)
    flags: int = _START.unpack_from(first)[2]
    fields = _REST.unpack_from(first, _START.size + DIGEST_BYTES)
    identity, parent, address, start, count, page_tokens, pools, blocks, ids_at, digests_at, data_at, size = fields
    if data_at > length or size != length:
        raise BadFile(f"the file has {length} bytes and should have {size}")
    data = first if len(first) == data_at else first[:data_at]
    view = memoryview(data)
    if checksum(view[: _START.size], view[_START.size + DIGEST_BYTES :]) != data[_START.size : 32]:
        raise BadFile("the header's checksum does not fit")
    if flags > _PARTIAL or not pools or not count or not page_tokens or blocks != -(-count // page_tokens):
        raise BadFile("the header's counts do not fit each other")
    digests_end = digests_at + DIGEST_BYTES * blocks * pools
    if ids_at != SEGMENT_HEAD + 8 * pools or digests_at != ids_at + 4 * count or data_at != rounded(digests_end):
        raise BadFile("the header's offsets do not fit its counts")
    shape = Shape(page_tokens, struct.unpack_from(f"<{pools}Q", data, SEGMENT_HEAD))
    if data_at + blocks * shape.block_bytes != size:
        raise BadFile("the size does not fit the counts")
    digests = tuple(data[at : at + DIGEST_BYTES] for at in range(digests_at, digests_end, DIGEST_BYTES))
    ids = np.frombuffer(data, "<i4", count, ids_at)
    return Header(identity, parent, address, start, count, shape, ids, digests, data_at, size)


def write(
    files: Files,
    fd: int,
    piece: Piece,
    entry: Entry,
    shape: Shape,
    block: Callable[[int], Sequence[np.ndarray]],
) -> Iterator[None]:
    """Write a segment to a new file, the header last. A step of the iterator is a run of blocks.

    :param block: gives the pages of a block, numbered from position 0 of the sequence: one uint8 array per pool. For a
        state the number is that of its position.
    """
    shape = shape.of(piece)
    first, digests = piece.start // shape.page_tokens, list[bytes]()
    offset, run, held = shape.header_bytes(piece.count), list[np.ndarray](), 0
    for number in range(first, first + shape.blocks(piece.count)):
        run.extend(block(number))
        held += shape.block_bytes
        if held >= RUN_BYTES or number == first + shape.blocks(piece.count) - 1:
            files.write(fd, run, offset)
            digests += [page_digest(page) for page in run]
            offset += held
            run, held = [], 0
            yield
    ids = entry.tokens[piece.start : piece.stop]
    files.write(fd, [encode(piece, entry.identity, ids, shape, digests)], 0)


def verify_pages(header: Header, data: bytes) -> None:
    """Compare the pages in a whole segment file with their digests.

    :raises BadFile: one is not what was written.
    """
    view, at = memoryview(data), header.data
    for number, digest in enumerate(header.digests):
        nbytes = header.shape.page_bytes[number % len(header.shape.page_bytes)]
        if xxh3_128_digest(view[at : at + nbytes]) != digest:
            raise BadFile(f"page {number} is not what was written")
        at += nbytes


def expect(header: Header, piece: Piece, identity: bytes, ids: np.ndarray | None, shape: Shape | None) -> None:
    """:raises BadFile: the segment is sound and another one than the manifest means."""
    if header.identity != identity:
        raise BadFile("the segment is of another identity")
    if (header.parent, header.address, header.start, header.count, header.size) != (
        piece.parent, piece.address, piece.start, piece.count, piece.size,
    ):  # fmt: skip
        raise BadFile("the segment is not the one the manifest names")
    if shape is not None and header.shape != shape.of(piece):
        raise BadFile("the segment's pages have another size")
    if ids is not None and not np.array_equal(header.ids, ids):
        raise BadFile("the segment's token ids are not those of the manifest")
