"""Session files: one conversation in one file that needs nothing beside it. ``docs/format.md`` has the bytes.

Reading trusts nothing: counts are checked against the size of the file before anything is allocated, and no block is
handed out whose digest does not fit. Both directions go block by block, so neither needs the conversation in memory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from xxhash import xxh3_128

from strata_core.conversations.identity import DIGEST_BYTES, Identity
from strata_core.errors import IdentityMismatch, InsufficientStorage, NotFound, SessionFileError, StorageError

MAGIC = b"STRATSES"
#: Of files without and with recurrent states.
PLAIN, WITH_STATES = 1, 2
GRAIN = 4096
TEMPORARY = ".strata-tmp-"

_START = struct.Struct("<8sII")
_REST = struct.Struct("<16sQQIIIIII")
_HEAD = _START.size + DIGEST_BYTES + _REST.size
_CONVERSATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MEMBERS = {
    "conversation": str, "tenant": str, "parts": dict, "created": float, "used": float, "reason": str, "pinned": bool,
    "turns": list,
}  # fmt: skip
_STATE_MEMBERS = {"states": list, "state_bytes": int}

#: The pages of one block: a uint8 array per pool; or a state, a single one.
Block = Sequence[np.ndarray]


def rounded(nbytes: int) -> int:
    """The next multiple of :data:`GRAIN`."""
    return -(-nbytes // GRAIN) * GRAIN


@attrs.frozen(eq=False)
class Session:
    """A conversation as a session file has it, without its pages.

    :ivar identity: digest that K/V compatibility hangs on, the tenant's salt included; :ivar parts: of it, without.
    :ivar tokens: int32 ids whose K/V the file holds, read-only.
    :ivar turns: positions of the tokens that open a turn, ascending.
    :ivar page_tokens: positions per page; :ivar page_bytes: bytes of a page of each pool.
    :ivar states: ascending positions whose recurrent states the file holds; :ivar state_bytes: bytes of each.
    """

    conversation: str
    tenant: str
    identity: bytes
    parts: Mapping[str, str]
    tokens: np.ndarray = attrs.field(repr=False)
    turns: tuple[int, ...]
    created: float
    used: float
    reason: str
    pinned: bool
    page_tokens: int
    page_bytes: tuple[int, ...]
    states: tuple[int, ...] = ()
    state_bytes: int = 0

    @property
    def version(self) -> int:
        return WITH_STATES if self.states else PLAIN

    def piece(self, number: int) -> tuple[int, int]:
        """Where, from the first block on, block number ``number`` is, and its bytes without the zeros behind it. States
        follow the blocks and are counted on."""
        beyond = number - self.blocks
        if beyond < 0:
            return number * self.stride, sum(self.page_bytes)
        return self.blocks * self.stride + beyond * rounded(self.state_bytes), self.state_bytes

    @property
    def pieces(self) -> int:
        """Blocks and states."""
        return self.blocks + len(self.states)

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // self.page_tokens)

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return rounded(sum(self.page_bytes))

    @property
    def data(self) -> int:
        """Where the first block is."""
        return _data_at(len(self.page_bytes), len(self._json()), len(self.tokens), self.pieces)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data + self.blocks * self.stride + len(self.states) * rounded(self.state_bytes)

    def header(self, digests: Sequence[bytes]) -> bytes:
        """All bytes before the data."""
        text, data, pools = self._json(), self.data, len(self.page_bytes)
        start = _START.pack(MAGIC, self.version, 0)
        rest = _REST.pack(
            self.identity, self.size, data, len(text), len(self.tokens), self.page_tokens, pools, self.blocks,
            len(self.states),
        )  # fmt: skip
        rest += struct.pack(f"<{pools}Q", *self.page_bytes) + text
        rest += np.ascontiguousarray(self.tokens, "<i4").tobytes() + b"".join(digests)
        rest = rest.ljust(data - _START.size - DIGEST_BYTES, b"\0")
        return start + xxh3_128(start + rest).digest() + rest

    def _json(self) -> bytes:
        about = {name: getattr(self, name) for name in _MEMBERS}
        about |= {"parts": dict(self.parts), "turns": [int(turn) for turn in self.turns]}
        about |= {"created": float(self.created), "used": float(self.used)}
        if self.states:
            about |= {"states": [int(position) for position in self.states], "state_bytes": self.state_bytes}
        return json.dumps(about, allow_nan=False, separators=(",", ":")).encode("ascii")


def check_identity(session: Session, identity: Identity, tenant: str) -> None:
    """:param identity: of the engine, without a tenant.

    :raises IdentityMismatch: the session's K/V are not this engine's and tenant's.
    """
    if session.identity != identity.for_tenant(tenant).digest:
        parts = identity.differing(session.parts) or ["API key"]
        raise IdentityMismatch(f"the session is of another identity: {', '.join(parts)} differ")


def write(path: Path, session: Session, blocks: Iterable[Block], *, durable: bool = True) -> int:
    """Write a session file in place of what is at ``path``, all or nothing; returns its size.

    :param blocks: :attr:`Session.pieces` of them, in order: blocks, then states.
    :param durable: return only when a power cut would not undo it.
    :raises InsufficientStorage: there is no space. :raises StorageError: it cannot be written.
    """
    temporary = path.with_name(TEMPORARY + secrets.token_hex(8))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with io.FileIO(os.open(temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o600), "w") as file:
            _write_all(file, session, blocks)
            if durable:
                getattr(os, "fdatasync", os.fsync)(file.fileno())
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _storage_error(path, error) from error
        raise
    return session.size


def _storage_error(path: Path, error: OSError) -> StorageError:
    kind = InsufficientStorage if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1)) else StorageError
    return kind(f"{path.name} cannot be written: {error.strerror or error}")


def _write_all(file: io.FileIO, session: Session, blocks: Iterable[Block]) -> None:
    digests: list[bytes] = []
    file.seek(session.data)
    for block in blocks:
        _, nbytes = session.piece(len(digests))
        padding = bytes(rounded(nbytes) - nbytes)
        digest = xxh3_128()
        for page in (*(page.data for page in block), memoryview(padding)):
            digest.update(page)
            _write(file, page)
        digests.append(digest.digest())
    if len(digests) != session.pieces:
        raise ValueError(f"{len(digests)} blocks were given for {session.pieces}")
    file.seek(0)
    _write(file, memoryview(session.header(digests)))


def _write(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # folders cannot be synced there
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SessionFile:
    """An open session file whose header was verified. For one thread at a time; closed by ``with`` or :meth:`close`.

    :param file: opened for reading, unbuffered; closed with this.
    :param name: what errors call it.
    :raises SessionFileError: it is no session file, of an unknown version, cut short or damaged.
    :raises StorageError: it cannot be read.
    """

    def __init__(self, file: io.FileIO, name: str):
        self._file = file
        self._name = name
        try:
            self.session, self._digests, self._data = self._parse()
        except OSError as error:
            file.close()
            raise self._unreadable(error) from error
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, path: Path) -> SessionFile:
        """Open a file by its path.

        :raises NotFound: there is none. :raises StorageError: it is a symbolic link or no regular file, or cannot be
            read. :raises SessionFileError: see the class.
        """
        # Not blocking: else a FIFO of that name would wait for somebody to write to it.
        names = ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
        try:
            if path.is_symlink():
                raise OSError(errno.ELOOP, "it is a symbolic link")
            fd = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in names))
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is no regular file")
        except FileNotFoundError:
            raise NotFound(f"there is no session file {path.name!r}", param="filename") from None
        except OSError as error:
            raise StorageError(f"{path.name} cannot be read: {error.strerror or error}") from error
        return cls(io.FileIO(fd, "r"), path.name)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read_block(self, number: int, buffers: Block) -> None:
        """Read one block (or state, counted on) into uint8 arrays, one per pool, and verify it. What they hold after an
        error means nothing.

        :raises SessionFileError: the block is not what was written. :raises StorageError: it cannot be read.
        """
        offset, nbytes = self.session.piece(number)
        padding = np.empty(rounded(nbytes) - nbytes, np.uint8)
        digest = xxh3_128()
        try:
            self._file.seek(self._data + offset)
            for buffer in (*buffers, padding):
                self._fill(buffer.data)
                digest.update(buffer.data)
        except OSError as error:
            raise self._unreadable(error) from error
        if digest.digest() != self._digests[number]:
            raise self._damaged(f"block {number} is not what was written")

    def verify(self) -> None:
        """Read and check everything.

        :raises SessionFileError: :raises StorageError: see :meth:`read_block`.
        """
        buffers = [np.empty(nbytes, np.uint8) for nbytes in self.session.page_bytes]
        for number in range(self.session.blocks):
            self.read_block(number, buffers)
        state = np.empty(self.session.state_bytes, np.uint8)
        for number in range(self.session.blocks, self.session.pieces):
            self.read_block(number, [state])

    # -- the header ---------------------------------------------------------------------------------------------

    def _parse(self) -> tuple[Session, list[bytes], int]:
        length = os.fstat(self._file.fileno()).st_size
        if length < _HEAD:
            raise self._damaged("it is no session file")
        head = self._take(0, _HEAD)
        magic, version, flags = _START.unpack_from(head)
        if magic != MAGIC:
            raise self._damaged("it is no session file")
        if version not in (PLAIN, WITH_STATES):
            raise self._damaged(f"it has version {version}, and only {PLAIN} and {WITH_STATES} are known")
        fields = _REST.unpack_from(head, _START.size + DIGEST_BYTES)
        identity, size, data, text_bytes, count, page_tokens, pools, blocks, states = fields
        if size != length:
            raise self._damaged(f"it has {length} bytes and should have {size}")
        sane = count and page_tokens and pools and blocks == -(-count // page_tokens) and not flags
        sane = sane and (states > 0) == (version == WITH_STATES)
        if not sane or data > length or data != _data_at(pools, text_bytes, count, blocks + states):
            raise self._damaged("the counts in its header do not fit each other")
        header = self._take(0, data)  # not more than the file has
        if xxh3_128(header[: _START.size] + header[32:]).digest() != header[_START.size : 32]:
            raise self._damaged("the checksum of its header does not fit")
        page_bytes = struct.unpack_from(f"<{pools}Q", header, _HEAD)
        text_at = _HEAD + 8 * pools
        about = self._about(header[text_at : text_at + text_bytes], count, states)
        state_bytes = about.get("state_bytes", 0)
        if not all(page_bytes) or data + blocks * rounded(sum(page_bytes)) + states * rounded(state_bytes) != size:
            raise self._damaged("its size does not fit its header")
        tokens = np.frombuffer(header, "<i4", count, text_at + text_bytes).astype(np.int32, copy=False)
        tokens.setflags(write=False)
        first = text_at + text_bytes + 4 * count
        digests = [header[at : at + DIGEST_BYTES] for at in _steps(first, blocks + states)]
        session = Session(
            identity=identity, tokens=tokens, page_tokens=page_tokens, page_bytes=page_bytes,
            **(about | {"turns": tuple(about["turns"]), "states": tuple(about.get("states", ()))}),
        )  # fmt: skip
        return session, digests, data

    def _about(self, text: bytes, count: int, states: int) -> dict[str, Any]:
        members = _MEMBERS | (_STATE_MEMBERS if states else {})
        try:
            about = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damaged("its JSON cannot be read") from None
        if not isinstance(about, dict) or {name: type(value) for name, value in about.items()} != members:
            raise self._damaged("its JSON does not have the members it should have")
        if not all(isinstance(value, str) for value in about["parts"].values()):
            raise self._damaged("the parts of its identity are not all text")
        if not (math.isfinite(about["created"]) and math.isfinite(about["used"])):
            raise self._damaged("a time in it is no number")
        if not _CONVERSATION.fullmatch(about["conversation"]):
            raise self._damaged("the id of its conversation is none")
        if not _ascending(about["turns"], -1, count - 1):
            raise self._damaged("its turns are not ascending positions")
        if states and not (_ascending(about["states"], 0, count) and len(about["states"]) == states):
            raise self._damaged("its states are not at ascending positions, as many as its header says")
        if states and about["state_bytes"] < 1:
            raise self._damaged("its states have no bytes")
        return about

    def _take(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._file.seek(offset)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            done = self._file.readinto(view)
            if not done:
                raise self._damaged("it ends too early")
            view = view[done:]

    def _damaged(self, why: str) -> SessionFileError:
        return SessionFileError(f"{self._name} cannot be used: {why}")

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"{self._name} cannot be read: {error.strerror or error}")


def _ascending(numbers: Sequence[Any], above: int, most: int) -> bool:
    """Whether these are whole numbers, each greater than the one before it, beginning above one and up to another."""
    for number in numbers:
        if type(number) is not int or not above < number <= most:
            return False
        above = number
    return True


def _steps(first: int, count: int) -> range:
    return range(first, first + DIGEST_BYTES * count, DIGEST_BYTES)


def _data_at(pools: int, text: int, tokens: int, blocks: int) -> int:
    return rounded(_HEAD + 8 * pools + text + 4 * tokens + DIGEST_BYTES * blocks)
