"""The folder of a level: its lock, its names, and what a start finds in it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

from strata_core.conversations.identity import Identity
from strata_core.errors import LevelError
from strata_tiers.files import Files, Found
from strata_tiers.layout import (
    FOLDER_BYTES,
    LOCK,
    TEMPORARY,
    BadFile,
    Piece,
    UnknownVersion,
    charge,
    is_segment_name,
    manifest_id,
    manifest_name,
    sound,
)
from strata_tiers.manifest import Manifest, parse

#: A manifest larger than this is not read: 16 million tokens.
MAX_MANIFEST = 128 << 20
#: Names in a level's folder that are no strangers. The archive has a folder and a budget of its own, and lies in the
#: cold level's folder unless it is put elsewhere.
ARCHIVE = "archive"
_OURS = frozenset({LOCK, "segments", "conversations", "quarantine", ARCHIVE})


class FolderInUse(LevelError):
    """Another process holds the folder's lock; the message has its pid."""

    exit_code = 8


@attrs.frozen(eq=False)
class Foreign:
    """A manifest that is not for this engine. :ivar why: which parts of the identity differ, or the version.
    :ivar manifest: None where the version is unknown."""

    path: Path
    why: str
    manifest: Manifest | None


@attrs.define(eq=False)
class Scan:
    """What lies in a folder. Sizes are charges, see :func:`strata_tiers.layout.charge`.

    :ivar manifests: of this identity, sound, with all segments there in the right size.
    :ivar stale: manifests that cannot be used as they are - damaged, or with segments missing or cut short - by path
        with the reason.
    :ivar cut: those of them that are sound, with the segments and states of theirs that can be used.
    :ivar unusable: those of which nothing can be used, with their charge.
    :ivar orphans: segments that no manifest names; :ivar leftovers: temporary files; :ivar quarantined: damaged ones;
    :ivar strangers: everything else; each path with its charge.
    :ivar nbytes: charge of all files, the folder's own included.
    """

    manifests: list[Manifest] = attrs.field(factory=list)
    cut: list[tuple[Manifest, tuple[Piece, ...]]] = attrs.field(factory=list)
    stale: dict[Path, str] = attrs.field(factory=dict)
    unusable: dict[Path, int] = attrs.field(factory=dict)
    foreign: list[Foreign] = attrs.field(factory=list)
    orphans: dict[Path, int] = attrs.field(factory=dict)
    leftovers: dict[Path, int] = attrs.field(factory=dict)
    quarantined: dict[Path, int] = attrs.field(factory=dict)
    strangers: dict[Path, int] = attrs.field(factory=dict)
    nbytes: int = 0

    @property
    def unclaimed(self) -> dict[Path, int]:
        """Orphans that may be deleted: none while a manifest that cannot be read might name them."""
        return {} if any(foreign.manifest is None for foreign in self.foreign) else self.orphans


class Directory:
    """A level's folder, held by this process unless it was opened to be read only.

    :raises LevelError: it cannot be made or read, or another process holds it.
    """

    def __init__(self, root: Path, files: Files, *, read_only: bool = False):
        self.root = root
        self.segments = root / "segments"
        self.conversations = root / "conversations"
        self.quarantine = root / "quarantine"
        self._conversations = f"{self.conversations}{os.sep}"
        self._files = files
        self._lock: int | None = None
        if read_only:
            if not root.is_dir():
                raise LevelError(f"{root} is no folder")
            self._refuse_links()
            return
        try:
            self.ensure()
        except OSError as error:
            raise LevelError(f"folder {root} cannot be used: {error.strerror or error}") from error

    def ensure(self) -> None:
        """Make what is missing of the folder, and hold its lock. Cheap when nothing is missing."""
        if self._lock is not None and self._still_there():
            return
        self.close()
        for folder in (self.root, self.segments, self.conversations, self.quarantine):
            self._files.make_folder(folder)
        self._refuse_links()
        self._lock = self._acquire(self.root / LOCK)

    def close(self) -> None:
        """Let another process have the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)  # the lock goes with it

    def temporary(self, final: Path) -> Path:
        """A new temporary name beside a final one."""
        return final.with_name(TEMPORARY + secrets.token_hex(8))

    def quarantined(self, path: Path) -> Path:
        """A new name in quarantine for a damaged file."""
        return self.quarantine / f"{path.name}.{secrets.token_hex(4)}"

    # -- what is there ------------------------------------------------------------------------------------------

    def scan(self, identity: Identity | None) -> Scan:
        """Look at everything, change nothing. Payloads are not read.

        :param identity: of the engine; None takes manifests of any identity.
        """
        found = Scan(nbytes=FOLDER_BYTES)
        sizes = {item.name: item for item in self._files.scan(self.segments)}
        used: set[str] = set()
        digests: dict[str, bytes] = {}
        for item in self._files.scan(self.conversations):
            entry_id = manifest_id(item.name)
            cost = charge(item.length if entry_id else item.size)
            found.nbytes += cost
            if item.name.startswith(TEMPORARY):
                found.leftovers[self.conversations / item.name] = cost
            elif entry_id is None:
                found.strangers[self.conversations / item.name] = cost
            else:
                used.update(self._look(found, entry_id, cost, identity, digests, sizes))
        for item in sizes.values():
            ours = item.name in used or is_segment_name(item.name)
            cost = charge(item.length if ours else item.size)
            found.nbytes += cost
            if item.name.startswith(TEMPORARY):
                found.leftovers[self.segments / item.name] = cost
            elif not ours:
                found.strangers[self.segments / item.name] = cost
            elif item.name not in used:
                found.orphans[self.segments / item.name] = cost
        for item in self._files.scan(self.quarantine):
            found.quarantined[self.quarantine / item.name] = charge(item.size)
        for path, size in _walk(self._files, self.root, _OURS):
            found.strangers[path] = charge(size)
            found.nbytes += charge(size)
        found.nbytes += sum(found.quarantined.values())
        return found

    def charge(self) -> int:
        """Charge of all files that are in the folder now."""
        total = FOLDER_BYTES
        for folder, ours in ((self.segments, is_segment_name), (self.conversations, manifest_id)):
            total += sum(charge(item.length if ours(item.name) else item.size) for item in self._files.scan(folder))
        total += sum(charge(item.size) for item in self._files.scan(self.quarantine))
        return total + sum(charge(size) for _, size in _walk(self._files, self.root, _OURS))

    def _look(
        self,
        found: Scan,
        entry_id: str,
        cost: int,
        identity: Identity | None,
        digests: dict[str, bytes],
        sizes: dict[str, Found],
    ) -> list[str]:
        """Sort one manifest in. Returns the names of the segments that it uses."""
        # Text, not a Path: there are thousands of them, and making one takes as long as reading the file.
        text = f"{self._conversations}{manifest_name(entry_id)}"
        try:
            manifest = parse(self._files.load(text, MAX_MANIFEST), entry_id)
        except UnknownVersion as error:
            found.foreign.append(Foreign(Path(text), str(error), None))
            return []
        except (BadFile, OSError) as error:
            path = Path(text)
            found.stale[path] = str(error)
            if isinstance(error, BadFile):
                found.unusable[path] = cost
            return []
        names = [piece.name for piece in manifest.pieces]
        entry = manifest.entry
        if identity is not None and not names:
            found.foreign.append(Foreign(Path(text), "only their token ids are kept", manifest))
            return names
        if identity is not None:
            if entry.tenant not in digests:
                digests[entry.tenant] = identity.for_tenant(entry.tenant).digest
            if entry.identity != digests[entry.tenant]:
                why = "identity differs: " + (", ".join(identity.differing(manifest.parts)) or "tenant")
                found.foreign.append(Foreign(Path(text), why, manifest))
                return names
        bad = []
        for piece in manifest.pieces:
            there = sizes.get(piece.name)
            if there is None or not there.regular or there.length != piece.size:
                bad.append(piece.name)
        if not bad:
            found.manifests.append(manifest)
            return names
        path, left = Path(text), sound(manifest.pieces, bad)
        found.stale[path] = f"{bad[0]} is {'not as it was written' if bad[0] in sizes else 'missing'}"
        if left:
            found.cut.append((manifest, left))
        else:
            found.unusable[path] = cost
        return [piece.name for piece in left]

    def read_manifest(self, path: Path, entry_id: str) -> Manifest:
        """:raises BadFile: damaged. :raises OSError: unreadable."""
        return parse(self._files.load(path, MAX_MANIFEST), entry_id)

    # -- the lock -----------------------------------------------------------------------------------------------

    def _refuse_links(self) -> None:
        for folder in (self.segments, self.conversations, self.quarantine):
            if folder.is_symlink():
                raise LevelError(f"{folder} is a symbolic link")

    def _still_there(self) -> bool:
        """Whether the lock that is held is that of the folder: somebody may have deleted both."""
        assert self._lock is not None
        try:
            named, held = (self.root / LOCK).stat(), os.fstat(self._lock)
        except OSError:
            return False
        folders = (self.segments, self.conversations, self.quarantine)
        return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev) and all(
            f.is_dir() and not f.is_symlink() for f in folders
        )

    def _acquire(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(path, flags, 0o600)
        try:
            _lock(fd)
        except OSError as error:
            holder = os.pread(fd, 32, 0) if hasattr(os, "pread") else b""
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            pid = holder.decode("ascii", "replace").strip() or "unknown"
            raise FolderInUse(f"folder {self.root} is in use by another process (pid {pid})") from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd


def _walk(files: Files, root: Path, known: frozenset[str]) -> Iterator[tuple[Path, int]]:
    """Files of others in the folder, with their sizes."""
    for item in files.scan(root):
        if item.name in known:
            continue
        yield root / item.name, item.size
        with contextlib.suppress(OSError):
            if not item.regular and (root / item.name).is_dir() and not (root / item.name).is_symlink():
                yield from _walk(files, root / item.name, frozenset())


def _lock(fd: int) -> None:
    """Take the exclusive lock or raise OSError; it goes when the process ends, however it does."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(fd, 1024, os.SEEK_SET)  # a byte behind the pid, which others can then read
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
