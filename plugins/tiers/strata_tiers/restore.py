"""Restores entries from their files, and deals with files that are not what was written.

A segment that fails is looked for on the other disk level and replaced from there. Where that fails it goes to
quarantine, and every entry that names it ends where it began. This is called by any thread; see ``Place.lock``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from strata_core.errors import DamagedEntry, LevelError
from strata_core.pool.sink import PageSink
from strata_core.pool.states import resumable
from strata_core.store.base import Entry
from strata_tiers import segment
from strata_tiers.adopt import AdoptJob, copy_verified
from strata_tiers.holdings import Part
from strata_tiers.jobs import StoreJob
from strata_tiers.layout import BadFile, charge, sound
from strata_tiers.place import Place
from strata_tiers.reader import Read, Reader, is_damage
from strata_tiers.scanning import shortened

log = logging.getLogger("strata.cache")

#: Segments are opened and read in groups of about this size. The more files, the better they share the threads; but
#: after damage a group is read again from its beginning.
GROUP_BYTES, GROUP_FILES = 256 << 20, 64


@attrs.define
class _BadPart(Exception):
    part: Part
    why: str


@attrs.frozen
class _Block:
    """A block of an entry, numbered from position 0, and where it is."""

    part: Part
    number: int
    fd: int
    offset: int
    digests: tuple[bytes, ...]


class Restorer:
    """:param siblings: the other disk levels.
    :param drop: has manifests and segments deleted. :param rewrite: has the manifest of an entry written again.
    :ivar counts: ``quarantined``, ``healed``: segments.
    """

    def __init__(
        self,
        place: Place,
        siblings: Callable[[], Sequence[Place]],
        drop: Callable[[Sequence[Path], Sequence[Part]], None],
        rewrite: Callable[[str], None],
    ):
        self.counts: Counter[str] = Counter()
        self._place = place
        self._siblings = siblings
        self._drop = drop
        self._rewrite = rewrite
        self._reader = Reader(place.files)

    def close(self) -> None:
        self._reader.close()

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        """See :meth:`strata_core.store.base.Level.load`."""
        place = self._place
        with place.lock:
            kept = place.holdings.kept.get(entry.id)
            if kept is None:
                raise LevelError(f"level {place.name} does not hold the entry any more")
            entry, job, parts = kept.entry, kept.job, list(kept.parts)
            if tokens > len(entry.tokens):
                raise DamagedEntry("the end of the entry is gone", good_tokens=len(entry.tokens))
            from_pages = job is not None and job.source is not None
            if from_pages:
                assert job is not None
                job.readers += 1
        if from_pages:
            assert job is not None
            self._copy(job, sink)
        elif isinstance(job, AdoptJob) and not job.done:
            job.source_level.load(entry, tokens, sink)  # it has it until the job is done and that was told
        else:
            needed = [part for part in parts if part.piece.start < tokens and not part.piece.state]
            needed += [_state(place.name, parts, position) for position in sink.states]
            for group in _groups(needed):
                self._read_group(entry, group, sink)

    def _copy(self, job: StoreJob, sink: PageSink) -> None:
        """Fill a sink from the pages of an entry that is still being written."""
        try:
            assert job.source is not None
            for number in range(sink.blocks):
                job.source.copy(number, sink.buffers(number))
                sink.filled(number)
            for position in sink.states:
                job.source.copy(job.source.state_number(position), sink.buffers(sink.state(position)))
                sink.filled(sink.state(position))
        finally:
            with self._place.lock:
                job.readers -= 1

    def _read_group(self, entry: Entry, parts: Sequence[Part], sink: PageSink) -> None:
        healed: set[str] = set()
        while True:
            try:
                self._read(entry, parts, sink)
                return
            except _BadPart as bad:
                part, why = bad.part, bad.why
            except OSError as error:
                raise LevelError(f"level {self._place.name} cannot be read: {error}") from error
            if part.piece.name not in healed and self._heal(part, entry):
                healed.add(part.piece.name)
                continue
            self.condemn(part, why)
            good = resumable(entry.states, part.piece.start)  # before a state there are the earlier ones
            raise DamagedEntry(f"segment {part.piece.name} of level {self._place.name}: {why}", good_tokens=good)

    def _read(self, entry: Entry, parts: Sequence[Part], sink: PageSink) -> None:
        """Read and verify some segments of an entry; the sink gets blocks when they are sound."""
        place, blocks = self._place, list[_Block]()
        with ExitStack() as open_files:
            for part in parts:
                fd, header = self._open(entry, part)
                open_files.callback(place.files.close, fd)
                piece, shape = part.piece, place.shape.of(part.piece)
                pools, first = len(shape.page_bytes), piece.start // shape.page_tokens
                count = min(shape.blocks(piece.count), sink.blocks - first)
                if piece.state:
                    first, count = sink.state(piece.stop), 1
                for block in range(count):
                    offset = header.data + block * shape.block_bytes
                    digests = header.digests[block * pools : (block + 1) * pools]
                    blocks.append(_Block(part, first + block, fd, offset, digests))
            # What goes to a device is read in halves of what may be on its way there: one is copied, one is read.
            most = sink.at_once if sink.at_once >= sink.blocks else max(1, sink.at_once // 2)
            for states, step in ((False, most), (True, sink.states_at_once)):
                chosen = [block for block in blocks if block.part.piece.state == states]
                for at in range(0, len(chosen), step):
                    self._fill(chosen[at : at + step], sink)

    def _fill(self, blocks: Sequence[_Block], sink: PageSink) -> None:
        bad = self._reader.fill([Read(b.fd, b.offset, sink.buffers(b.number), b.digests) for b in blocks])
        if bad is not None:
            raise _BadPart(blocks[bad[0]].part, bad[1])
        for block in blocks:
            sink.filled(block.number)

    def _open(self, entry: Entry, part: Part) -> tuple[int, segment.Header]:
        """An open segment file with its verified header."""
        place = self._place
        with place.lock:
            paths = [place.segment_path(part)]
            if not part.settled and part.temporary is not None:
                paths.insert(0, part.temporary)  # not there any more: it has just got its final name
        for path in paths:
            try:
                fd = place.files.open(path)
                break
            except OSError as error:
                if path is paths[-1]:
                    if is_damage(error):
                        raise _BadPart(part, str(error.strerror or error)) from error
                    raise
        try:
            header = segment.read(place.files, fd)
            piece = part.piece
            segment.expect(header, piece, entry.identity, entry.tokens[piece.start : piece.stop], place.shape)
        except BaseException as error:
            place.files.close(fd)
            if isinstance(error, BadFile) or (isinstance(error, OSError) and is_damage(error)):
                raise _BadPart(part, str(error)) from error
            raise
        return fd, header

    # -- damage -------------------------------------------------------------------------------------------------

    def _heal(self, part: Part, entry: Entry) -> bool:
        """Replace a segment by a sound copy of another level. False when there is none."""
        place = self._place
        for sibling in self._siblings():
            source = sibling.directory.segments / part.piece.name
            if sibling.files.length_of(source) is None:
                continue
            final = place.segment_path(part)
            temporary = place.directory.temporary(final)
            try:
                fd = place.files.create(temporary)
                try:
                    copy_verified(place.files, source, fd, part.piece, entry, place.shape)
                    place.files.sync(fd)
                finally:
                    place.files.close(fd)
            except (BadFile, OSError) as error:
                log.debug("segment %s of level %s is no help: %s", part.piece.name, sibling.name, error)
                _unlink(place, temporary)
                continue
            self._quarantine(part)
            try:
                place.files.rename(temporary, final)
                place.files.sync_folder(place.directory.segments)
            except OSError:
                _unlink(place, temporary)
                return False
            place.account(part.charge)
            self.counts["healed"] += 1
            log.warning("segment %s of level %s was damaged; %s had it", part.piece.name, place.name, sibling.name)
            return True
        return False

    def condemn(self, part: Part, why: str) -> None:
        """Put a segment out of reach, and cut every entry that names it."""
        place = self._place
        with place.lock:
            if not part.users:
                return  # somebody else was faster
            log.warning("segment %s of level %s is damaged: %s", part.piece.name, place.name, why)
            self._quarantine(part)
            place.holdings.forget(part)
            for entry_id in list(part.users):
                kept = place.holdings.kept[entry_id]
                if kept.job is not None and kept.job.source is not None and not kept.job.done:
                    place.holdings.exchange(kept, part)  # its pages are still here, to write it again from
                    continue
                left = sound([p.piece for p in kept.parts], {part.piece.name})
                if left:
                    shorter = shortened(kept.entry, left, place.shape.page_tokens)
                    free = place.holdings.shorten(entry_id, shorter, [p for p in kept.parts if p.piece in left])
                    self._rewrite(entry_id)
                    self._drop([], [p for p in free if p is not part])
                else:
                    _, free = place.holdings.remove(entry_id)
                    self._drop([place.manifest_path(entry_id)], [p for p in free if p is not part])

    def _quarantine(self, part: Part) -> None:
        """Move a segment's file away, if it is there."""
        place = self._place
        path = place.segment_path(part)
        target = place.directory.quarantined(path)
        try:
            length = place.files.length_of(path)
            place.files.rename(path, target)
        except OSError as error:
            log.debug("segment %s could not be put into quarantine: %s", part.piece.name, error)
            return
        cost = charge(length or 0)
        with place.lock:
            self.counts["quarantined"] += 1
            place.account(cost - part.charge)
            place.garbage[target] = cost
            place.holdings.others += cost


def _state(level: str, parts: Sequence[Part], position: int) -> Part:
    for part in parts:
        if part.piece.state and part.piece.stop == position:
            return part
    raise DamagedEntry(f"level {level} has no state of the entry at position {position}")


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    group: list[Part] = []
    for part in parts:
        if group and (len(group) >= GROUP_FILES or sum(p.piece.size for p in group) + part.piece.size > GROUP_BYTES):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _unlink(place: Place, path: Path) -> None:
    try:
        place.files.unlink(path)
    except OSError as error:
        log.debug("a temporary file stays: %s", error)
