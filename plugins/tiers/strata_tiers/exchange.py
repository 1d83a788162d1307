"""Conversations between a level's folder and session files, without an engine. Every page is verified on the way."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import attrs
import numpy as np

from strata_core.conversations.identity import Identity, page_addresses
from strata_core.errors import DamagedEntry, LevelError, StrataError
from strata_core.store.base import Entry
from strata_core.store.session import Session, SessionFile, write
from strata_tiers import manifest, segment
from strata_tiers.check import find
from strata_tiers.cut import Limits, plan
from strata_tiers.directory import Directory
from strata_tiers.files import Files
from strata_tiers.layout import BadFile, Piece, Shape, manifest_name
from strata_tiers.manifest import Manifest
from strata_tiers.newfile import NewFile, Progress, no_progress
from strata_tiers.reader import Read, Reader

Block = tuple[np.ndarray, ...]


def export_entry(folder: Path, entry_id: str, target: Path, *, progress: Progress = no_progress) -> int:
    """Write an entry to a session file, in place of what is at ``target``. Returns its size.

    :raises NotFound: there is no such entry. :raises LevelError: it is damaged or cannot be read.
    :raises StorageError: the file cannot be written.
    """
    files, found = Files(), find(folder, entry_id)
    if not found.pieces:
        raise LevelError(f"only the token ids of {entry_id} are kept, and a session needs what was computed of them")
    directory = Directory(folder, files, read_only=True)
    with _reading(found):
        session = _session_of(found, _shape(files, directory, found))
    return write(target, session, _blocks(files, directory, found, len(session.tokens), progress))


def import_entry(folder: Path, source: Path, *, progress: Progress = no_progress) -> str:
    """Put the conversation of a session file into a folder; returns the id of the new entry.

    Segments that are there already are used. A budget is applied when a server opens the folder.

    :raises SessionFileError: the file is damaged. :raises LevelError: a process uses the folder, or it cannot be
        written.
    """
    files = Files()
    with SessionFile.open(source) as file:
        file.verify()  # before anything is written: a damaged file shall leave nothing behind
        directory = Directory(folder, files)
        try:
            return _import(files, directory, file, progress)
        except StrataError:
            raise
        except OSError as error:
            raise LevelError(f"{source.name} cannot be imported: {error.strerror or error}") from error
        finally:
            directory.close()


def _session_of(found: Manifest, shape: Shape) -> Session:
    """As far as it can be resumed: the state at its end may have been damaged."""
    entry = found.entry
    tokens = entry.resumable(len(entry.tokens))
    return Session(
        conversation=entry.conversation, tenant=entry.tenant, identity=entry.identity, parts=found.parts,
        tokens=entry.tokens[:tokens], turns=tuple(turn for turn in entry.turns if turn < tokens),
        created=entry.created, used=entry.used, reason=entry.reason, pinned=entry.pinned,
        page_tokens=shape.page_tokens, page_bytes=shape.page_bytes, states=entry.states or (),
        state_bytes=shape.state_bytes,
    )  # fmt: skip


def _shape(files: Files, directory: Directory, found: Manifest) -> Shape:
    """Sizes of pages and states, which only their files know."""
    states = [piece for piece in found.pieces if piece.state]
    first = _shape_in(files, directory, found.pieces[0])
    return attrs.evolve(first, state_bytes=_shape_in(files, directory, states[0]).block_bytes if states else 0)


def _shape_in(files: Files, directory: Directory, piece: Piece) -> Shape:
    fd = files.open(directory.segments / piece.name)
    try:
        return segment.read(files, fd).shape
    finally:
        files.close(fd)


def _blocks(
    files: Files, directory: Directory, found: Manifest, tokens: int, progress: Progress
) -> Iterator[Block]:
    """All blocks of an entry's first tokens, verified; each is valid until the next."""
    pieces = [piece for piece in found.pieces if piece.start < tokens]
    done, total = 0, sum(piece.size for piece in pieces)
    for piece in pieces:
        count = 1 if piece.state else -(-(tokens - piece.start) // found.page_tokens)
        with _reading(found):
            yield from islice(_blocks_of(files, directory, found, piece), count)
        done += piece.size
        progress(done, total)


def _blocks_of(files: Files, directory: Directory, found: Manifest, piece: Piece) -> Iterator[Block]:
    reader = Reader(files, 1)
    fd = files.open(directory.segments / piece.name)
    try:
        header, ids = segment.read(files, fd), found.entry.tokens[piece.start : piece.stop]
        segment.expect(header, piece, found.entry.identity, ids, None)
        shape, pools = header.shape, len(header.shape.page_bytes)
        buffers = tuple(np.empty(nbytes, np.uint8) for nbytes in shape.page_bytes)
        for number in range(shape.blocks(piece.count)):
            digests = header.digests[number * pools : (number + 1) * pools]
            bad = reader.fill([Read(fd, header.data + number * shape.block_bytes, buffers, digests)])
            if bad is not None:
                raise BadFile(f"segment {piece.name}, block {number}: {bad[1]}")
            yield buffers
    finally:
        files.close(fd)


@contextmanager
def _reading(found: Manifest) -> Iterator[None]:
    try:
        yield
    except BadFile as error:
        raise DamagedEntry(f"conversation {found.entry.id} is damaged: {error}") from error
    except OSError as error:
        if isinstance(error, StrataError):
            raise
        raise LevelError(f"conversation {found.entry.id} cannot be read: {error.strerror or error}") from error


def _import(files: Files, directory: Directory, file: SessionFile, progress: Progress) -> str:
    session = file.session
    entry = _entry_of(session)
    shape = Shape(session.page_tokens, session.page_bytes, session.state_bytes)
    known = _known(directory)
    pieces = plan(entry, shape, Limits(), lambda parent: known.get(parent, ()))
    there = {piece.name for pieces_of in known.values() for piece in pieces_of}
    done, total = 0, sum(piece.size for piece in pieces)
    for piece in pieces:
        if piece.name not in there:
            with NewFile(files, directory.segments / piece.name, piece.size) as fd:
                read = partial(_state, file, piece.stop) if piece.state else partial(_block, file)
                for _ in segment.write(files, fd, piece, entry, shape, read):
                    pass
        done += piece.size
        progress(done, total)
    data = manifest.encode(entry, session.parts, pieces, shape.page_tokens)
    with NewFile(files, directory.conversations / manifest_name(entry.id), len(data)) as fd:
        files.write(fd, [data], 0)
    return entry.id


def _known(directory: Directory) -> dict[bytes, list[Piece]]:
    """Segments of sound entries, by the address before them."""
    found: dict[bytes, list[Piece]] = {}
    for one in directory.scan(None).manifests:
        for piece in one.pieces:
            found.setdefault(piece.parent, []).append(piece)
    return found


def _block(file: SessionFile, number: int) -> Block:
    buffers = tuple(np.empty(nbytes, np.uint8) for nbytes in file.session.page_bytes)
    file.read_block(number, buffers)
    return buffers


def _state(file: SessionFile, position: int, number: int) -> Block:
    """The state at a position; its ``number`` within its own file does not matter."""
    state = np.empty(file.session.state_bytes, np.uint8)
    file.read_block(file.session.blocks + file.session.states.index(position), [state])
    return (state,)


def _entry_of(session: Session) -> Entry:
    """The entry that a session becomes. Its digest is that of its tenant already."""
    identity = Identity(session.identity, session.parts)
    return Entry(
        id=uuid.uuid4().hex, conversation=session.conversation, identity=session.identity, tokens=session.tokens,
        addresses=page_addresses(identity, session.tokens, session.page_tokens), created=session.created,
        used=session.used, reason="import", tenant=session.tenant, pinned=session.pinned, turns=session.turns,
        states=session.states or None,
    )  # fmt: skip
