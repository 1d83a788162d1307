"""What a level holds: entries, the segments they share, and the account of both. No files are touched here.

A segment counts once however many entries use it. Entries that are leaving weigh nothing, so a segment weighs as long
as one of its entries stays. Where entries weigh anything, the level's folders and lock do too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from strata_core.conversations.index import PrefixIndex, Query
from strata_core.store.base import Entry
from strata_tiers import manifest
from strata_tiers.cut import Limits, plan
from strata_tiers.layout import FOLDER_BYTES, Piece, Shape, charge

if TYPE_CHECKING:
    from strata_tiers.jobs import StoreJob


@attrs.define(eq=False)
class Part:
    """A segment of this level.

    :ivar users: ids of the entries that name it; :ivar stayers: how many of them are not leaving.
    :ivar settled: it is complete under its final name. :ivar temporary: where it is complete before.
    :ivar charge: of its file.
    """

    piece: Piece
    users: set[str] = attrs.field(factory=set)
    stayers: int = 0
    settled: bool = False
    temporary: Path | None = None
    charge: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.charge = charge(self.piece.size)


@attrs.define(eq=False)
class Kept:
    """An entry of this level.

    :ivar parts: its segments from position 0 on, then its states. :ivar charge: of its manifest.
    :ivar job: what still writes it, None once that is done and told.
    """

    entry: Entry
    parts: list[Part]
    charge: int
    leaving: bool = False
    job: StoreJob | None = None


class Holdings:
    """:param identity_parts: as manifests carry them.
    :param root_key: system prompts kept under another key are listed, but not found.
    :ivar others: charge of files that are no entry's.
    """

    def __init__(self, shape: Shape, limits: Limits, identity_parts: Mapping[str, str], root_key: str = ""):
        self.shape = shape
        self.limits = limits
        self.identity_parts = identity_parts
        self.root_key = root_key
        self.kept: dict[str, Kept] = {}
        self.others = 0
        self._parts: dict[str, Part] = {}
        self._by_parent: dict[bytes, dict[str, Part]] = {}
        self._by_last: dict[bytes, set[str]] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._bytes = 0
        self._staying = 0

    @property
    def nbytes(self) -> int:
        """Charge of everything but what leaves."""
        return self._bytes + self.others + (FOLDER_BYTES if self._staying or self.others else 0)

    @property
    def staying(self) -> int:
        """Entries that are not leaving."""
        return self._staying

    def find(self, query: Query, excluded: Collection[str]) -> list[tuple[Entry, int]]:
        return [(self.kept[key].entry, shared) for key, shared in self._index.longest(query, excluded)]

    def beginnings(self, entry: Entry) -> list[Entry]:
        found = []
        for address in (entry.identity, *entry.addresses):
            for key in self._by_last.get(address, ()):
                other = self.kept[key].entry
                count = len(other.tokens)
                same = other.identity == entry.identity and np.array_equal(other.tokens, entry.tokens[:count])
                if key != entry.id and same:
                    found.append(other)
        return found

    # -- what things cost ---------------------------------------------------------------------------------------

    def plan(self, entry: Entry) -> Sequence[Piece]:
        """The segments the entry would have, those that are here first."""
        return plan(entry, self.shape, self.limits, self._known)

    def manifest_charge(self, entry: Entry, pieces: Sequence[Piece]) -> int:
        return charge(manifest.size(entry, self.identity_parts, pieces))

    def cost(self, entry: Entry, pieces: Sequence[Piece]) -> int:
        """What the entry would add to :attr:`nbytes`."""
        total = self.manifest_charge(entry, pieces)
        for piece in pieces:
            part = self._parts.get(piece.name)
            if part is None or not part.stayers:
                total += charge(piece.size)
        return total + (0 if self._staying or self.others else FOLDER_BYTES)

    def weigh(self, entries: Collection[Entry]) -> int:
        """What exactly these entries would count."""
        parts: dict[str, Piece] = {}
        by_parent: dict[bytes, list[Piece]] = {}
        total = FOLDER_BYTES if entries else 0

        def add(pieces: Iterable[Piece]) -> None:
            for piece in pieces:
                if piece.name not in parts:
                    parts[piece.name] = piece
                    by_parent.setdefault(piece.parent, []).append(piece)

        absent = []
        for entry in entries:
            kept = self.kept.get(entry.id)
            if kept is None:
                absent.append(entry)
            else:
                total += kept.charge
                add(part.piece for part in kept.parts)
        for entry in absent:
            pieces = plan(entry, self.shape, self.limits, lambda parent: tuple(by_parent.get(parent, ())))
            total += self.manifest_charge(entry, pieces)
            add(pieces)
        return total + sum(charge(piece.size) for piece in parts.values())

    # -- changes ------------------------------------------------------------------------------------------------

    def add(self, entry: Entry, pieces: Sequence[Piece], *, manifest_bytes: int | None = None) -> Kept:
        """List an entry.

        :param manifest_bytes: size of its manifest when it is on the disk, segments and all; None when it is new and
            segments that are not here yet are still to be written.
        """
        settled = manifest_bytes is not None
        cost = self.manifest_charge(entry, pieces) if manifest_bytes is None else charge(manifest_bytes)
        kept = Kept(entry, [], cost)
        for piece in pieces:
            part = self._parts.get(piece.name)
            if part is None:
                part = self._new(piece, settled)
            kept.parts.append(part)
            self._use(part, kept)
        self._bytes += kept.charge
        self._staying += 1
        self._list(kept)
        return kept

    def remove(self, entry_id: str) -> tuple[Kept, list[Part]]:
        """Forget an entry; also returns the segments that nobody uses any more."""
        kept = self.kept[entry_id]
        self._unlist(kept)
        if not kept.leaving:
            self._bytes -= kept.charge
            self._staying -= 1
        return kept, self._let_go(kept, kept.parts)

    def shorten(self, entry_id: str, entry: Entry, parts: Sequence[Part]) -> list[Part]:
        """Keep only these segments and states of an entry, which is ``entry`` from now on; returns those that nobody
        uses any more."""
        kept = self.kept[entry_id]
        self._unlist(kept)
        free = self._let_go(kept, [part for part in kept.parts if part not in parts])
        kept.parts = list(parts)
        before, kept.charge = kept.charge, self.manifest_charge(entry, [part.piece for part in kept.parts])
        if not kept.leaving:
            self._bytes += kept.charge - before
        kept.entry = entry
        self._list(kept)
        return free

    def exchange(self, kept: Kept, old: Part) -> None:
        """Let an entry that still has its pages use a new, unwritten segment in place of a bad one."""
        number = kept.parts.index(old)
        self._let_go(kept, [old])
        fresh = self._parts.get(old.piece.name)
        if fresh is None:
            fresh = self._new(old.piece, settled=False)
        kept.parts[number] = fresh
        self._use(fresh, kept)

    def forget(self, part: Part) -> None:
        """Offer a segment to no further entry; those that use it go on."""
        if self._parts.get(part.piece.name) is part:
            del self._parts[part.piece.name]
            siblings = self._by_parent[part.piece.parent]
            del siblings[part.piece.name]
            if not siblings:
                del self._by_parent[part.piece.parent]

    def set_leaving(self, entry_id: str, leaving: bool) -> None:
        kept = self.kept[entry_id]
        if kept.leaving == leaving:
            return
        kept.leaving = leaving
        sign = -1 if leaving else 1
        self._bytes += sign * kept.charge
        self._staying += sign
        for part in kept.parts:
            before = part.stayers
            part.stayers += sign
            if not before or not part.stayers:
                self._bytes += sign * part.charge

    def part(self, name: str) -> Part | None:
        """The segment of this name that new entries would use."""
        return self._parts.get(name)

    def parts(self) -> Collection[Part]:
        """All segments."""
        return self._parts.values()

    def _known(self, parent: bytes) -> Iterable[Piece]:
        return [part.piece for part in self._by_parent.get(parent, {}).values()]

    def _new(self, piece: Piece, settled: bool) -> Part:
        part = self._parts[piece.name] = Part(piece, settled=settled)
        self._by_parent.setdefault(piece.parent, {})[piece.name] = part
        return part

    def _use(self, part: Part, kept: Kept) -> None:
        part.users.add(kept.entry.id)
        if not kept.leaving:
            part.stayers += 1
            if part.stayers == 1:
                self._bytes += part.charge

    def _let_go(self, kept: Kept, parts: Iterable[Part]) -> list[Part]:
        free = []
        for part in parts:
            part.users.discard(kept.entry.id)
            if not kept.leaving:
                part.stayers -= 1
                if not part.stayers:
                    self._bytes -= part.charge
            if not part.users:
                self.forget(part)
                free.append(part)
        return free

    def _list(self, kept: Kept) -> None:
        entry = kept.entry
        self.kept[entry.id] = kept
        if not entry.root or entry.key == self.root_key:
            self._index.add(entry.id, entry)
        self._by_last.setdefault(_last(entry), set()).add(entry.id)

    def _unlist(self, kept: Kept) -> None:
        del self.kept[kept.entry.id]
        if kept.entry.id in self._index:
            self._index.remove(kept.entry.id)
        ids = self._by_last[_last(kept.entry)]
        ids.discard(kept.entry.id)
        if not ids:
            del self._by_last[_last(kept.entry)]


def _last(entry: Entry) -> bytes:
    return entry.addresses[-1] if entry.addresses else entry.identity
