"""Names, sizes and the small values of the on-disk format, see ``docs/format.md``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

import attrs
import numpy as np
from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from strata_core.conversations.identity import DIGEST_BYTES

VERSION = 1
GRAIN = 4096
#: What a level is charged for its folders and lock, and for the name of each file.
FOLDER_BYTES, NAME_BYTES = 32 << 10, 128

TEMPORARY = ".strata-tmp-"
LOCK = "strata.lock"
SEGMENT_HEAD = 136

_SEGMENT = re.compile(r"strata-(?:seg|state)-([0-9a-f]{32})-([0-9]{1,12})(?:-([a-z0-9_-]{1,64}))?\.seg")
_MANIFEST = re.compile(r"strata-conv-([a-z0-9_-]{1,64})\.meta")
_ID = re.compile(r"[a-z0-9_-]{1,64}")


class BadFile(ValueError):
    """A file is not what the format says; the message says in what."""


class UnknownVersion(BadFile):
    """A file of our kind, of a version that this program does not know."""


def rounded(nbytes: int) -> int:
    """What a file of so many bytes takes on the disk."""
    return -(-nbytes // GRAIN) * GRAIN


def charge(nbytes: int) -> int:
    """What a file of so many bytes counts against a level's budget."""
    return -(-nbytes // GRAIN) * GRAIN + NAME_BYTES


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3-128 of one or several parts, canonical byte order."""
    state = xxh3_128()
    for part in parts:
        state.update(part)
    digest: bytes = state.digest()
    return digest


def page_digest(page: np.ndarray) -> bytes:
    """Digest of one page, a contiguous uint8 array. Releases the interpreter while it works."""
    digest: bytes = xxh3_128_digest(page.data)
    return digest


def valid_id(entry_id: str) -> bool:
    """Whether an entry's id can be part of a file's name on every system."""
    return _ID.fullmatch(entry_id) is not None


def manifest_name(entry_id: str) -> str:
    return f"strata-conv-{entry_id}.meta"


def manifest_id(name: str) -> str | None:
    """The entry's id in a manifest's name, None for other names."""
    match = _MANIFEST.fullmatch(name)
    return match[1] if match else None


def is_segment_name(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


@attrs.frozen
class Shape:
    """How large things are: positions per page, and bytes of a page of each pool.

    :ivar state_bytes: of a recurrent state; 0 for models without.
    """

    page_tokens: int
    page_bytes: tuple[int, ...]
    state_bytes: int = attrs.field(default=0, eq=False)

    def of(self, piece: Piece) -> Shape:
        """What a piece is laid out by. A state is like a segment with a single page, of one position: the one before
        which everything was computed."""
        return Shape(1, (self.state_bytes,)) if piece.state else self

    @property
    def block_bytes(self) -> int:
        return sum(self.page_bytes)

    def blocks(self, count: int) -> int:
        """Blocks that hold ``count`` positions."""
        return -(-count // self.page_tokens)

    def header_bytes(self, count: int) -> int:
        """Where the data of a segment of ``count`` positions begins."""
        pools = len(self.page_bytes)
        return rounded(SEGMENT_HEAD + 8 * pools + 4 * count + DIGEST_BYTES * self.blocks(count) * pools)

    def segment_bytes(self, count: int) -> int:
        return self.header_bytes(count) + self.blocks(count) * self.block_bytes


@attrs.frozen
class Piece:
    """A segment as a manifest names it: positions ``[start, start + count)``, the addresses around it, the file's size.

    :ivar owner: id of the entry it belongs to where it ends within a page, else empty.
    :ivar state: it is the recurrent state at ``stop`` instead, and both addresses are that of what was computed.
    :ivar name: of its file.
    """

    parent: bytes
    address: bytes
    start: int
    count: int
    size: int
    owner: str = ""
    state: bool = False
    name: str = attrs.field(init=False, eq=False)

    @name.default
    def _name(self) -> str:
        tail = f"-{self.owner}" if self.owner else ""
        kind = "state" if self.state else "seg"
        return f"strata-{kind}-{self.address.hex()}-{self.start}{tail}.seg"

    @property
    def stop(self) -> int:
        return self.start + self.count


def sound(pieces: Sequence[Piece], bad: Collection[str]) -> tuple[Piece, ...]:
    """What is left of an entry's pieces without those of these names: the segments before the first bad one, and the
    good states among them. Nothing, where that is no segment, or no state of an entry that needs one. Pure."""
    segments = tuple(takewhile(lambda piece: piece.name not in bad, (p for p in pieces if not p.state)))
    if not segments:
        return ()
    listed = [piece for piece in pieces if piece.state]
    states = tuple(p for p in listed if p.name not in bad and p.stop <= segments[-1].stop)
    return segments + states if states or not listed else ()


def next_address(parent: bytes, ids: np.ndarray) -> bytes:
    """Address of a page with these ids, complete or not, behind ``parent``."""
    return blake3(parent + np.ascontiguousarray(ids, "<i4").tobytes()).digest(length=DIGEST_BYTES)
