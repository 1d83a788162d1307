"""Moving a conversation's pages between the engine and files, on the thread of whoever asked.

The engine thread only hands out and takes pages, between its steps; reading, hashing and writing happen on the caller's
thread, from and into the pages themselves where these are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import numpy as np

from strata_core.conversations.placement import Action
from strata_core.errors import DamagedEntry, LevelError, Overloaded, SessionFileError, StorageError
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry
from strata_core.store.session import Block, Session, SessionFile

if TYPE_CHECKING:
    from strata_core.conversations.restoring import Restore, Stored
    from strata_core.engine.core import EngineCore
    from strata_core.engine.engine import Engine

T = TypeVar("T")

#: Host memory that pages take on their way from a device.
STAGING_BYTES = 8 << 20
#: How often a restore is looked at: a device's pages are copied on when it is.
POLL_S = 0.01


@attrs.frozen
class Transfer:
    """What was moved. ``place``: where it is now; ``nbytes``: of the file; ``seconds``: all of it, waiting included."""

    conversation: str
    tokens: int
    nbytes: int
    seconds: float
    place: str = ""


@attrs.frozen(eq=False)
class Held:
    """A conversation whose pages are held, so that they stay as they are. Made and released by the engine thread.

    :ivar views: the pages of every block where they are in host memory, else None.
    """

    session: Session
    pages: HeldPages
    views: list[Block] | None

    @classmethod
    def take(cls, core: EngineCore, entry: Entry, pages: HeldPages) -> Held:
        """:param pages: of the entry; their hold passes to the result.

        :raises Overloaded: the rule for all placements refuses it, as there is no memory for copies on their way.
        """
        columns = [_views(pool, table) for pool, table in zip(pages.pools, pages.tables, strict=True)]
        states = [] if pages.states is None else _views(pages.states.pool, pages.states.pages)
        views: list[Block] | None = None
        if all(column is not None for column in (*columns, states)):
            views = [*zip(*columns, strict=True), *((state,) for state in states or ())]
        parking = core.keeper.parking
        verdict = parking.ask("save", 0 if views is not None else STAGING_BYTES, parking.available())
        if verdict.action is Action.REFUSE:
            pages.release()
            raise Overloaded(f"memory admission; {verdict.reason}", retry_after=10)
        return cls(session_of(core, entry), pages, views)

    def blocks(self, engine: Engine) -> Iterator[Block]:
        """All blocks in order; each is valid until the next one is asked for."""
        if self.views is not None:
            yield from self.views
            return
        window = max(1, STAGING_BYTES // sum(self.session.page_bytes))
        for first in range(0, self.session.blocks, window):
            count = min(window, self.session.blocks - first)
            rows = [np.empty((count, nbytes), np.uint8) for nbytes in self.session.page_bytes]
            engine.call(partial(self._download, first, rows))
            yield from zip(*rows, strict=True)
        for number in range(len(self.session.states)):
            state = np.empty((1, self.session.state_bytes), np.uint8)
            engine.call(partial(self._download_state, number, state))
            yield (state[0],)

    def _download(self, first: int, rows: list[np.ndarray], core: EngineCore) -> None:
        events = [
            pool.store.download(table[first : first + len(target)], target)
            for pool, table, target in zip(self.pages.pools, self.pages.tables, rows, strict=True)
        ]
        for event in events:
            event.wait()

    def _download_state(self, number: int, target: np.ndarray, core: EngineCore) -> None:
        states = self.pages.states
        assert states is not None
        states.pool.store.download([states.pages[number]], target).wait()

    def release(self, engine: Engine) -> None:
        engine.call(lambda core: self.pages.release())


def _views(pool: PagePool, pages: Sequence[int]) -> list[np.ndarray] | None:
    """Pages where they are in host memory; None where they are not."""
    views = [pool.store.host_view(page) for page in pages]
    found = [view for view in views if view is not None]
    return found if len(found) == len(views) else None


def session_of(core: EngineCore, entry: Entry) -> Session:
    """An entry as a session file has it."""
    state_pool = core.keeper.state_pool
    return Session(
        conversation=entry.conversation,
        tenant=entry.tenant,
        identity=entry.identity,
        parts=core.keeper.identity.parts,
        tokens=entry.tokens,
        turns=entry.turns,
        created=entry.created,
        used=entry.used,
        reason=entry.reason,
        pinned=entry.pinned,
        page_tokens=core.keeper.page_tokens,
        page_bytes=tuple(pool.layout.nbytes for pool in core.keeper.pools),
        states=entry.states or (),
        state_bytes=0 if state_pool is None else state_pool.layout.nbytes,
    )


def bring_back(engine: Engine, stored: Stored, take: Callable[[EngineCore, HeldPages], T]) -> T:
    """Read a stored entry into fresh pages and, when all of them are verified, have the engine thread take them.

    :param take: keeps what it needs of the pages, which are released after it.
    :raises OutOfMemory: the pools have no room. :raises LevelError: memory admission refuses it, or it cannot be read.
    """
    return _complete(engine, _begin(engine, stored, whole=True), take)


def _begin(engine: Engine, stored: Stored, *, whole: bool) -> Restore:
    return engine.call(lambda core: core.keeper.restorer.begin(stored, len(stored.entry.tokens), whole=whole))


def _complete(engine: Engine, restore: Restore, take: Callable[[EngineCore, HeldPages], T]) -> T:
    try:
        while not engine.call(lambda core: restore.done()):
            restore.wait(POLL_S)
    except BaseException:
        engine.call(lambda core: core.keeper.restorer.abandon(restore))
        raise

    def finish(core: EngineCore) -> T:
        pages = core.keeper.restorer.finish(restore)
        try:
            return take(core, pages)
        finally:
            pages.release()

    return engine.call(finish)


@attrs.frozen(eq=False)
class FileSource:
    """A session file as something to restore from."""

    file: SessionFile
    name: str = "session"
    loads_aside: bool = True

    def held(self, entry: Entry) -> HeldPages | None:
        return None

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        try:
            for number in range(sink.blocks):
                self.file.read_block(number, sink.buffers(number))
                sink.filled(number)
            session = self.file.session
            for position in sink.states:
                number = sink.state(position)
                self.file.read_block(session.blocks + session.states.index(position), sink.buffers(number))
                sink.filled(number)
        except SessionFileError as error:
            raise DamagedEntry(error.message) from error
        except StorageError as error:
            raise LevelError(error.message) from error


@attrs.frozen(eq=False)
class StoredFile:
    """A session file and the entry it becomes."""

    level: FileSource
    entry: Entry


def from_file(
    engine: Engine, stored: StoredFile, take: Callable[[EngineCore, HeldPages], T], *, whole: bool = True
) -> T:
    """:func:`bring_back` for a session file.

    :param whole: with all its states, to be kept elsewhere; else with as many as a slot has room for.
    :raises SessionFileError: it is damaged. :raises OutOfMemory: the pools have no room. :raises Overloaded: the rule
        for all placements refuses the memory now. :raises StorageError: it cannot be read. Nothing was changed.
    """
    try:
        restore = _begin(engine, stored, whole=whole)
    except LevelError as error:
        raise Overloaded(error.message, retry_after=10) from error
    try:
        return _complete(engine, restore, take)
    except DamagedEntry as error:
        raise SessionFileError(error.message) from error
    except LevelError as error:
        raise StorageError(error.message) from error
