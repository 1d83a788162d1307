"""Takes over what a start finds in a level's folder: entries are listed, everything else is counted and reported."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Sequence

import attrs

from strata_core.conversations.identity import Identity
from strata_core.store.base import Entry
from strata_tiers.directory import Scan
from strata_tiers.layout import FOLDER_BYTES, Piece, Shape, manifest_id
from strata_tiers.manifest import Manifest
from strata_tiers.place import Place

log = logging.getLogger("strata.cache")


@attrs.frozen
class Ready:
    """What a start found; numbers of conversations, files, and bytes charged."""

    conversations: int
    nbytes: int
    stale: int
    foreign: int
    orphans: int
    oversized: int
    leftovers: int
    quarantined: int


def take_over(place: Place, identity: Identity) -> Ready:
    """List what is usable and account for all of it. Nothing is deleted or changed."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here becomes garbage, and looking for it would take half of the time
    try:
        return _take_over(place, identity)
    finally:
        if collecting:
            gc.enable()


def _take_over(place: Place, identity: Identity) -> Ready:
    scan = place.directory.scan(identity)
    holdings = place.holdings
    misfits = 0
    usable = [(manifest, manifest.pieces) for manifest in scan.manifests] + scan.cut
    for manifest, pieces in usable:
        if not _fits(manifest, place.shape):
            misfits += 1
            place.taken.add(manifest.entry.id)
            continue
        entry = manifest.entry
        if pieces is not manifest.pieces:
            entry = shortened(entry, pieces, manifest.page_tokens)
        holdings.add(entry, pieces, manifest_bytes=manifest.size)
    holdings.others = scan.nbytes - FOLDER_BYTES - sum(
        [kept.charge for kept in holdings.kept.values()] + [part.charge for part in holdings.parts()]
    )
    place.taken.update(manifest_id(foreign.path.name) or "" for foreign in scan.foreign)
    place.physical = scan.nbytes - FOLDER_BYTES
    # In the order in which they may go: what never was anybody's first.
    for found in (scan.leftovers, scan.unclaimed, scan.unusable, scan.quarantined):
        place.garbage.update(found)
    ready = Ready(
        conversations=len(holdings.kept),
        nbytes=holdings.nbytes,
        stale=len(scan.stale),
        foreign=len(scan.foreign) + misfits,
        orphans=len(scan.orphans),
        oversized=sum(
            FOLDER_BYTES + kept.charge + sum(part.charge for part in kept.parts) > place.max_bytes
            for kept in holdings.kept.values()
        ),
        leftovers=len(scan.leftovers),
        quarantined=len(scan.quarantined),
    )
    _report(place, scan, ready)
    return ready


def shortened(entry: Entry, pieces: Sequence[Piece], page_tokens: int) -> Entry:
    """The entry as far as these segments go, with these states. Unless they are all, they end at a page boundary."""
    count = max(piece.stop for piece in pieces if not piece.state)
    return attrs.evolve(
        entry,
        tokens=entry.tokens[:count],
        addresses=entry.addresses[: count // page_tokens],
        turns=tuple(turn for turn in entry.turns if turn < count),
        states=None if entry.states is None else tuple(piece.stop for piece in pieces if piece.state),
    )


def _fits(manifest: Manifest, shape: Shape) -> bool:
    """Whether pages are of this shape, and there are states where the model needs them: without, nothing could resume
    from what is offered."""
    if manifest.page_tokens != shape.page_tokens or (manifest.entry.states is None) != (not shape.state_bytes):
        return False
    return all(piece.size == shape.of(piece).segment_bytes(piece.count) for piece in manifest.pieces)


def _report(place: Place, scan: Scan, ready: Ready) -> None:
    log.info(
        "disk ready (%d conversations, %d MiB, %d stale, %d foreign, %d orphans, %d oversized) %s",
        ready.conversations, ready.nbytes >> 20, ready.stale, ready.foreign, ready.orphans, ready.oversized,
        place.name,
    )  # fmt: skip
    for why, count in Counter(foreign.why for foreign in scan.foreign).items():
        log.info("%s: %d conversations are kept and not used: %s", place.name, count, why)
    for path, why in list(scan.stale.items())[:5]:
        log.warning("%s: %s cannot be used: %s", place.name, path.name, why)
