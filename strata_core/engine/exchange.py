"""Conversations out of the engine, into it, and checked where they are stored."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from strata_core.conversations.ladder import Found
from strata_core.conversations.live import Live
from strata_core.engine.sessions import check_ids, check_usable, entry_of
from strata_core.engine.transfer import FileSource, Held, StoredFile, Transfer, bring_back, from_file
from strata_core.errors import (
    DamagedEntry,
    InsufficientStorage,
    LevelError,
    NotFound,
    OutOfMemory,
    StorageError,
    StrataError,
)
from strata_core.pool.checking import CheckingSink
from strata_core.pool.pool import PagePool
from strata_core.pool.states import resumable
from strata_core.pool.table import HeldPages
from strata_core.store import session as files
from strata_core.store.base import Entry
from strata_core.store.session import SessionFile

if TYPE_CHECKING:
    from strata_core.engine.core import EngineCore
    from strata_core.engine.engine import Engine

log = logging.getLogger("strata.cache")


@attrs.frozen
class Verified:
    """What reading one stored copy came to.

    :ivar good_tokens: how many of its tokens can be resumed from. :ivar error: what is wrong with the rest.
    """

    place: str
    tokens: int
    good_tokens: int
    nbytes: int
    seconds: float
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


def export(engine: Engine, conversation: str, tenant: str, path: Path) -> Transfer:
    """Write the longest copy of a conversation that is sound to a session file. Not synced: it is a copy.

    :raises NotFound: nothing of that id is kept for the tenant. :raises StorageError: it cannot be written, or no copy
        can be read.
    """
    start = time.monotonic()
    with engine.working():
        held, place = _longest(engine, conversation, tenant)
        try:
            nbytes = files.write(path, held.session, held.blocks(engine), durable=False)
        finally:
            held.release(engine)
    return Transfer(conversation, len(held.session.tokens), nbytes, time.monotonic() - start, place)


def import_session(engine: Engine, file: SessionFile, tenant: str) -> Transfer:
    """Make a session file's conversation one that is parked, wherever the rule for all placements puts it.

    :raises SessionFileError: :raises IdentityMismatch: :raises InvalidRequest: it cannot be used here.
    :raises InsufficientStorage: nothing could keep it. :raises OutOfMemory: :raises Overloaded: no memory now.
    """
    start = time.monotonic()
    session = file.session
    with engine.working():
        check_ids(session, engine.geometry.vocab)

        def check(core: EngineCore) -> Entry:
            check_usable(core, session, tenant)
            return entry_of(session, core.keeper.identity, tenant, "import")

        entry = engine.call(check)

        def park(core: EngineCore, pages: HeldPages) -> str:
            level = core.keeper.parking.park(entry, pages)
            if level is None:
                raise InsufficientStorage("nothing could keep the conversation: no level has room for it")
            return level.name

        place = from_file(engine, StoredFile(FileSource(file), entry), park)
    log.info("imported %d tokens to %s", len(session.tokens), place)
    return Transfer(session.conversation, len(session.tokens), session.size, time.monotonic() - start, place)


def verify(engine: Engine, conversation: str, tenant: str) -> list[Verified]:
    """Read all stored copies of a conversation and check every page. What is damaged is dealt with as in a restore:
    healed from another level, or put out of reach.

    :raises NotFound: nothing of that id is kept for the tenant.
    """
    with engine.working():
        found = engine.call(lambda core: _stored(core, conversation, tenant))
        if not found and not engine.call(lambda core: _is_live(core, conversation, tenant)):
            raise NotFound(f"no conversation {conversation!r} is kept", param="id")
        try:
            return [_verify(engine, one) for one in found]
        finally:
            engine.call(lambda core: _unguard(core, found))


def _verify(engine: Engine, found: Found) -> Verified:
    start = time.monotonic()
    entry, level = found.entry, found.level
    tokens = good = len(entry.tokens)
    error: str | None = None

    def read(pools: tuple[PagePool, ...], state_pool: PagePool | None) -> None:
        states = None if state_pool is None else (state_pool, entry.states or ())
        sink = CheckingSink(pools, tokens, states)
        level.load(entry, tokens, sink)
        sink.complete()

    pools, states, nbytes = engine.call(
        lambda core: (core.keeper.pools, core.keeper.state_pool, level.weigh([entry]))
    )
    try:
        if level.loads_aside:
            read(pools, states)
        else:
            engine.call(lambda core: read(pools, states))
    except LevelError as failure:
        error, good = failure.message, failure.good_tokens if isinstance(failure, DamagedEntry) else 0
        _refused(engine, found, failure)
    return Verified(level.name, tokens, good, nbytes, time.monotonic() - start, error)


def _longest(engine: Engine, conversation: str, tenant: str) -> tuple[Held, str]:
    """The longest copy that can be had, its pages held, and where it was."""
    live = engine.call(lambda core: _hold_live(core, conversation, tenant))
    stored = engine.call(lambda core: _stored(core, conversation, tenant))
    try:
        error: StrataError = NotFound(f"no conversation {conversation!r} is kept", param="id")
        for found in stored:
            if live is not None and found.shared <= len(live.session.tokens):
                break
            try:
                held = _hold_stored(engine, found)
            except (LevelError, OutOfMemory) as failure:
                _refused(engine, found, failure)
                error = StorageError(f"no copy of the conversation can be read: {failure.message}")
                continue
            if live is not None:
                live.release(engine)
            return held, found.level.name
    except BaseException:
        if live is not None:
            live.release(engine)
        raise
    finally:
        engine.call(lambda core: _unguard(core, stored))
    if live is None:
        raise error
    return live, "slot"


def _hold_stored(engine: Engine, found: Found) -> Held:
    entry = found.entry
    tokens = found.shared  # nothing could resume behind it: the state there was damaged

    def take(core: EngineCore, pages: HeldPages) -> Held:
        return Held.take(core, _beginning(entry, tokens, core.keeper.page_tokens), pages.fork(tokens))

    return bring_back(engine, found, take)


def _refused(engine: Engine, found: Found, error: StrataError) -> None:
    engine.call(lambda core: core.keeper.refused(found, error))


# -- on the engine thread ---------------------------------------------------------------------------------------


def _lives(core: EngineCore, conversation: str, tenant: str) -> list[tuple[Live, int]]:
    """What slots hold of a conversation, with how many tokens of it can be relied on."""
    found = []
    for slot in core.slots:
        live = slot.live
        if live is not None and live.keep and live.conversation == conversation and live.tenant == tenant:
            tokens = len(live.tokens)
            if slot.task is not None:  # which still writes the last page
                tokens = resumable(live.positions, tokens - tokens % live.page_tokens)
            found.append((live, tokens))
    return found


def _is_live(core: EngineCore, conversation: str, tenant: str) -> bool:
    return bool(_lives(core, conversation, tenant))


def _hold_live(core: EngineCore, conversation: str, tenant: str) -> Held | None:
    live, tokens = max(_lives(core, conversation, tenant), key=lambda found: found[1], default=(None, 0))
    if live is None or not tokens:
        return None
    return Held.take(core, _beginning(live.entry("export"), tokens, live.page_tokens), live.hold(tokens))


def _beginning(entry: Entry, tokens: int, page_tokens: int) -> Entry:
    """The first tokens of an entry as an entry."""
    return attrs.evolve(
        entry,
        tokens=entry.tokens[:tokens],
        addresses=entry.addresses[: tokens // page_tokens],
        turns=tuple(turn for turn in entry.turns if turn < tokens),
        states=None if entry.states is None else tuple(p for p in entry.states if p <= tokens),
    )


def _stored(core: EngineCore, conversation: str, tenant: str) -> list[Found]:
    """Stored copies as far as they can be resumed, the longest first, guarded until :func:`_unguard`."""
    ladder = core.keeper.ladder
    copies = [(level, entry) for level, entry in ladder.copies(conversation) if entry.tenant == tenant]
    for _, entry in copies:
        ladder.guard(entry)
    return sorted((Found(lv, e, e.resumable(len(e.tokens))) for lv, e in copies), key=lambda f: -f.shared)


def _unguard(core: EngineCore, stored: list[Found]) -> None:
    for found in stored:
        core.keeper.ladder.unguard(found.entry)
