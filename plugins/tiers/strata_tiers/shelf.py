"""What lies in an archive's folder, and the rules for what leaves it. Called by the writer's thread only.

The folder looks like a level's, see ``docs/format.md``: manifests, and, where K/V are kept, segments that copies share.
Of each copy only a line is held in memory, as nobody searches here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs

from strata_core.errors import LevelError
from strata_core.store.base import Entry
from strata_tiers import manifest, segment
from strata_tiers.adopt import copy_verified
from strata_tiers.cut import Limits, plan
from strata_tiers.directory import Directory
from strata_tiers.files import Files
from strata_tiers.layout import FOLDER_BYTES, Piece, Shape, charge, manifest_name
from strata_tiers.newfile import NewFile
from strata_tiers.pages import PageSource


@attrs.frozen
class ArchiveOptions:
    """:ivar mode: whether only token ids are kept, or K/V too.
    :ivar keep: most copies per conversation; 0 is no limit.
    :ivar max_age_s: age since it was archived after which a copy goes; 0 is never.
    """

    mode: Literal["ids", "state"]
    max_bytes: int
    keep: int = 4
    max_age_s: float = 0.0


@attrs.frozen(eq=False)
class Offer:
    """A copy to keep.

    :ivar entry: as it will be listed: ``reason`` says why it is here, ``used`` since when.
    :ivar pages: where its K/V are in memory; :ivar files: where they are on a disk; both None where only ids are kept.
    """

    entry: Entry
    pages: PageSource | None = None
    files: Sequence[tuple[Piece, Path]] | None = None


@attrs.frozen(eq=False)
class _Copy:
    id: str
    conversation: str
    tenant: str
    why: str
    when: float
    charge: int
    pieces: tuple[Piece, ...]


def victims(copies: Iterable[_Copy], conversation: str, keep: int) -> list[_Copy]:
    """Copies of a conversation that go when another is added to it, so that ``keep`` are left. Pure.

    What was superseded goes before what its client rewrote: the newer copies still begin with the former, while the
    latter is nowhere else. Among equals the oldest go.
    """
    own = [copy for copy in copies if copy.conversation == conversation]
    over = len(own) + 1 - keep
    if not keep or over <= 0:
        return []
    return sorted(own, key=lambda copy: (copy.why != "superseded", copy.when))[:over]


class Shelf:
    """:param report: told how many bytes and copies there are whenever that changes.

    :param identity_parts: as manifests carry them.
    """

    def __init__(
        self,
        directory: Directory,
        files: Files,
        options: ArchiveOptions,
        shape: Shape,
        limits: Limits,
        identity_parts: Mapping[str, str],
        report: Callable[[int, int], None],
    ):
        self._directory = directory
        self._files = files
        self._options = options
        self._shape = shape
        self._limits = limits
        self._parts = identity_parts
        self._report = report
        self._copies: dict[str, _Copy] = {}
        self._users: dict[str, set[str]] = {}  # segment's name -> ids of the copies that name it
        self._by_parent: dict[bytes, dict[str, Piece]] = {}
        self._garbage: dict[Path, int] = {}
        self._bytes = 0  # charge of all that is there

    def open(self) -> None:
        """See what is there. Nothing is deleted by it, but for what does not fit the bounds any more."""
        scan = self._directory.scan(None)
        for found, pieces in [(found, found.pieces) for found in scan.manifests] + scan.cut:
            self._list(found.entry, pieces, charge(found.size))
        self._bytes = scan.nbytes - FOLDER_BYTES
        for garbage in (scan.leftovers, scan.unclaimed, scan.unusable, scan.quarantined):
            self._garbage.update(garbage)
        self._make_room(lambda: 0)
        self._tell()

    def keep(self, offer: Offer) -> tuple[int, int]:
        """Keep a copy, durably. Returns bytes and segments written; names for existing files count as none.

        :raises LevelError: it is larger than the archive may be. :raises OSError: :raises BadFile: it could not be
            written or read. Nothing of it is kept then.
        """
        entry = offer.entry
        self._directory.ensure()
        self._remove([self._copies[entry.id]] if entry.id in self._copies else ())
        pieces = self._pieces(offer)
        own = charge(manifest.size(entry, self._parts, pieces))
        least = own + sum(charge(piece.size) for piece in pieces)
        if FOLDER_BYTES + least > self._options.max_bytes:
            raise LevelError(f"a copy of {least >> 20} MiB is larger than the archive may be")
        self._remove(victims(self._copies.values(), entry.conversation, self._options.keep))
        self._make_room(lambda: own + sum(charge(p.size) for p in pieces if p.name not in self._users))
        fresh = [piece for piece in pieces if not self._is_there(piece)]
        try:
            written = self._write(offer, pieces, fresh)
        except BaseException:
            self._unlink(self._directory.conversations / manifest_name(entry.id), 0)
            for piece in fresh:
                if piece.name not in self._users:
                    self._unlink(self._directory.segments / piece.name, 0)
            raise
        for piece in fresh:  # one that lay here unused has become one that is used
            self._bytes -= self._garbage.pop(self._directory.segments / piece.name, 0)
        self._bytes += own + sum(charge(piece.size) for piece in pieces if piece.name not in self._users)
        self._list(entry, pieces, own)
        self._tell()
        return written, len(fresh)

    def expire(self, now: float) -> None:
        """Delete what has been here for too long. :param now: seconds since the epoch."""
        self._remove([copy for copy in self._copies.values() if now - copy.when > self._options.max_age_s])
        self._tell()

    def forget(self, conversation: str, tenant: str | None) -> None:
        """Delete all copies of a conversation."""
        own = [copy for copy in self._copies.values() if copy.conversation == conversation]
        self._remove([copy for copy in own if tenant is None or copy.tenant == tenant])
        self._tell()

    # -- writing ------------------------------------------------------------------------------------------------

    def _pieces(self, offer: Offer) -> Sequence[Piece]:
        if offer.files is not None:
            return [piece for piece, _ in offer.files]
        if offer.pages is None:
            return ()
        return plan(offer.entry, self._shape, self._limits, lambda at: tuple(self._by_parent.get(at, {}).values()))

    def _is_there(self, piece: Piece) -> bool:
        """Whether a segment is here. Looks, as somebody may have deleted it."""
        return piece.name in self._users and (
            self._files.length_of(self._directory.segments / piece.name) == piece.size
        )

    def _write(self, offer: Offer, pieces: Sequence[Piece], fresh: Sequence[Piece]) -> int:
        sources = {piece.name: path for piece, path in offer.files or ()}
        if offer.pages is not None:
            offer.pages.stage([number for piece in fresh for number in offer.pages.numbers(piece, self._shape)])
        written = 0
        for piece in fresh:
            source = sources.get(piece.name)
            if source is None or not self._link(source, self._directory.segments / piece.name):
                self._copy(offer, piece, source)
                written += piece.size
        if fresh:
            self._files.sync_folder(self._directory.segments)
        data = manifest.encode(offer.entry, self._parts, pieces, self._shape.page_tokens)
        with NewFile(self._files, self._directory.conversations / manifest_name(offer.entry.id), len(data)) as fd:
            self._files.write(fd, [data], 0)
        return written + len(data)

    def _link(self, source: Path, target: Path) -> bool:
        """Give a segment file a second name here. False where the volume does not let it."""
        try:
            with suppress(FileNotFoundError):
                self._files.unlink(target)  # what a crash left under this name
            self._files.link(source, target)
            return True
        except FileNotFoundError:
            raise
        except OSError:
            return False

    def _copy(self, offer: Offer, piece: Piece, source: Path | None) -> None:
        entry, shape = offer.entry, self._shape
        with NewFile(self._files, self._directory.segments / piece.name, piece.size) as fd:
            if source is not None:
                copy_verified(self._files, source, fd, piece, entry, shape)
                return
            assert offer.pages is not None
            for _ in segment.write(self._files, fd, piece, entry, shape, offer.pages.reader(piece)):
                pass

    # -- leaving ------------------------------------------------------------------------------------------------

    def _make_room(self, need: Callable[[], int]) -> None:
        """Let what no copy needs go, then the oldest copies, until ``need()`` bytes fit: less, as copies that go may
        leave what it shares, or more, where they take that along."""
        room = self._options.max_bytes - FOLDER_BYTES
        for path, cost in list(self._garbage.items()):
            if self._bytes + need() <= room:
                return
            self._unlink(path, cost)
            self._garbage.pop(path)
        while self._copies and self._bytes + need() > room:
            self._remove([min(self._copies.values(), key=lambda copy: copy.when)])

    def _remove(self, copies: Collection[_Copy]) -> None:
        """Delete copies: their manifests, then, when that is safe, the segments that no other copy names."""
        for copy in copies:
            self._unlink(self._directory.conversations / manifest_name(copy.id), copy.charge)
            del self._copies[copy.id]
        if any(copy.pieces for copy in copies):
            self._files.sync_folder(self._directory.conversations)
        for copy in copies:
            for piece in copy.pieces:
                users = self._users[piece.name]
                users.discard(copy.id)
                if not users:
                    del self._users[piece.name]
                    siblings = self._by_parent[piece.parent]
                    del siblings[piece.name]
                    if not siblings:
                        del self._by_parent[piece.parent]
                    self._unlink(self._directory.segments / piece.name, charge(piece.size))

    def _unlink(self, path: Path, cost: int) -> None:
        """What cannot be deleted stays counted until the next start finds it."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._bytes -= cost

    def _list(self, entry: Entry, pieces: Sequence[Piece], own: int) -> None:
        copy = _Copy(
            entry.id, entry.conversation, entry.tenant, entry.reason, entry.used, own, tuple(pieces)
        )
        self._copies[entry.id] = copy
        for piece in pieces:
            self._users.setdefault(piece.name, set()).add(entry.id)
            self._by_parent.setdefault(piece.parent, {})[piece.name] = piece

    def _tell(self) -> None:
        self._report(self._bytes + FOLDER_BYTES if self._bytes else 0, len(self._copies))
