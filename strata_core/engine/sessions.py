"""Saving what a slot holds to a session file, restoring it, and erasing it."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from strata_core.conversations.identity import Identity, page_addresses
from strata_core.engine.transfer import FileSource, Held, StoredFile, Transfer, from_file
from strata_core.errors import (
    Conflict,
    ContextLengthExceeded,
    InsufficientStorage,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    SessionFileError,
)
from strata_core.events import ConversationRestored
from strata_core.pool.table import HeldPages
from strata_core.store import session as files
from strata_core.store.base import Entry
from strata_core.store.session import Session, SessionFile

if TYPE_CHECKING:
    from strata_core.engine.core import EngineCore
    from strata_core.engine.engine import Engine
    from strata_core.engine.slots import Slot

log = logging.getLogger("strata.cache")


def save_slot(engine: Engine, slot: int, path: Path, tenant: str, min_free: int) -> Transfer:
    """Write what a slot holds to a session file, in place of what is there; returns when it is durable.

    Requests go on meanwhile, also in this slot: what is written is what it held when this was called.

    :param tenant: whose conversation it must be; :param min_free: bytes that must stay free on the disk.
    :raises NotFound: there is no such slot. :raises Conflict: a request is running in it. :raises InvalidRequest: it
        holds nothing of this tenant. :raises InsufficientStorage: :raises StorageError: it cannot be written.
    """
    start = time.monotonic()
    with engine.working():
        held = engine.call(lambda core: _hold(core, _idle(core, slot), tenant))
        try:
            _check_room(path.parent, held.session.size, min_free)
            nbytes = files.write(path, held.session, held.blocks(engine))
        finally:
            held.release(engine)
    session, seconds = held.session, time.monotonic() - start
    log.info("saved %d tokens (%d MiB) to a session file in %.1f ms", len(session.tokens), nbytes >> 20, 1e3 * seconds)
    return Transfer(session.conversation, len(session.tokens), nbytes, seconds)


def restore_slot(engine: Engine, slot: int, path: Path, tenant: str) -> Transfer:
    """Bring a session file's conversation into a slot, so that the next request that continues it resumes from it.

    The file is read into fresh pages and verified; only then is what the slot held parked. Where the pools cannot hold
    both, all of the file is verified first.

    :raises NotFound: there is no such slot or file. :raises Conflict: a request is running in the slot.
    :raises SessionFileError: the file is damaged. :raises IdentityMismatch: it is of another engine or tenant.
    :raises InvalidRequest: nothing could resume from it here. :raises OutOfMemory: the pools have no room for it.
    :raises Overloaded: memory admission refuses it now.
    """
    start = time.monotonic()
    with engine.working(), SessionFile.open(path) as file:
        session = file.session
        check_ids(session, engine.geometry.vocab)
        identity = engine.call(lambda core: _reserve(core, _idle(core, slot), session, tenant))
        try:
            stored = StoredFile(FileSource(file), entry_of(session, identity, tenant, "restore"))

            def take(core: EngineCore, pages: HeldPages) -> None:
                _take(core, core.slots[slot], pages, session, tenant)

            try:
                from_file(engine, stored, take, whole=False)
            except OutOfMemory:
                file.verify()  # so that the slot is given up only for something that will be there
                if not engine.call(lambda core: _vacate(core, core.slots[slot])):
                    raise
                from_file(engine, stored, take, whole=False)
        finally:
            engine.call(lambda core: setattr(core.slots[slot], "reserved", False))
    seconds = time.monotonic() - start
    engine.call(lambda core: _report(core, session, seconds))
    return Transfer(session.conversation, len(session.tokens), session.size, seconds, f"slot {slot}")


def erase_slot(engine: Engine, slot: int, tenant: str) -> int:
    """Forget what a slot holds, without keeping it anywhere; stored copies stay. Returns how many tokens it held.

    :raises NotFound: there is no such slot. :raises Conflict: a request is running in it.
    """

    def erase(core: EngineCore) -> int:
        found = _idle(core, slot)
        live = found.live
        if live is None or live.tenant != tenant:
            return 0
        tokens = len(live.tokens)
        core.keeper.forget(live, "erased")
        found.live = None
        return tokens

    return engine.call(erase)


def check_usable(core: EngineCore, session: Session, tenant: str) -> None:
    """Whether a request could resume from a session here.

    :raises IdentityMismatch: :raises InvalidRequest: it could not; the message says why.
    """
    keeper, tokens = core.keeper, len(session.tokens)
    files.check_identity(session, keeper.identity, tenant)
    shape = (keeper.page_tokens, tuple(pool.layout.nbytes for pool in keeper.pools))
    if (session.page_tokens, session.page_bytes) != shape:
        raise SessionFileError("the session cannot be used: its pages have another size than its identity says")
    pool = keeper.state_pool
    if session.state_bytes != (pool.layout.nbytes if pool is not None else 0):
        raise SessionFileError("the session cannot be used: its states have another size than its identity says")
    if pool is not None and tokens not in session.states:
        raise SessionFileError("the session cannot be used: it has no state at its end")
    if not keeper.options.enabled:
        raise InvalidRequest("the conversation cache is off: no request could resume from what is restored")
    if tokens + 1 > core.options.max_context:
        raise ContextLengthExceeded(
            f"the session has {tokens} tokens and the context holds {core.options.max_context}: nothing could follow it"
        )
    rules = keeper.options.rules
    if not rules.allow(tokens, tokens + 1):
        raise InvalidRequest(
            f"the session has {tokens} tokens, and --conversation-cache-n-min {rules.n_min} with "
            f"--conversation-cache-similarity {rules.similarity:g} lets no request resume from so few"
        )


def check_ids(session: Session, vocabulary: int) -> None:
    """:raises SessionFileError: there are token ids beyond the model's. No engine wrote that file."""
    low, high = int(session.tokens.min()), int(session.tokens.max())
    if low < 0 or high >= vocabulary:
        raise SessionFileError(f"the session cannot be used: token ids {low} to {high} are not all of the model")


def entry_of(session: Session, identity: Identity, tenant: str, reason: str) -> Entry:
    """The entry that a session becomes, used now.

    :param identity: of the engine, without the tenant; it was checked.
    """
    addresses = page_addresses(identity.for_tenant(tenant), session.tokens, session.page_tokens)
    return Entry(
        id=uuid.uuid4().hex,
        conversation=session.conversation,
        identity=session.identity,
        tokens=session.tokens,
        addresses=addresses,
        created=session.created,
        used=time.time(),
        reason=reason,
        tenant=tenant,
        pinned=session.pinned,
        turns=session.turns,
        states=session.states or None,
    )


# -- on the engine thread ---------------------------------------------------------------------------------------


def _idle(core: EngineCore, number: int) -> Slot:
    if not 0 <= number < len(core.slots):
        raise NotFound(f"there is no slot {number}; there are 0 to {len(core.slots) - 1}", param="id_slot")
    slot = core.slots[number]
    if slot.task is not None:
        raise Conflict(f"slot {number} is busy with request {slot.task.handle.id}", param="id_slot")
    if slot.reserved:
        raise Conflict(f"a session is being restored to slot {number}", param="id_slot")
    return slot


def _hold(core: EngineCore, slot: Slot, tenant: str) -> Held:
    live = slot.live
    if live is None or live.tenant != tenant or not len(live.tokens):
        raise InvalidRequest(f"slot {slot.id} holds no conversation to save", param="id_slot")
    return Held.take(core, live.entry("save"), live.hold(len(live.tokens)))


def _reserve(core: EngineCore, slot: Slot, session: Session, tenant: str) -> Identity:
    check_usable(core, session, tenant)
    slot.reserved = True
    return core.keeper.identity


def _vacate(core: EngineCore, slot: Slot) -> bool:
    live, slot.live = slot.live, None
    if live is not None:
        core.keeper.park(live, "switch")
    return live is not None


def _take(core: EngineCore, slot: Slot, pages: HeldPages, session: Session, tenant: str) -> None:
    keeper = core.keeper
    live = keeper.begin(tenant)
    live.conversation, live.created, live.pinned = session.conversation, session.created, session.pinned
    live.used, live.prompt = keeper.clock.time(), len(session.tokens)
    live.adopt(pages, session.tokens)
    _vacate(core, slot)
    slot.live = live


def _report(core: EngineCore, session: Session, seconds: float) -> None:
    tokens = len(session.tokens)
    log.info("restored %d tokens (session)/(end) in %.1f ms", tokens, 1e3 * seconds)
    core.keeper.parking.emit(
        ConversationRestored(
            conversation=session.conversation, tokens=tokens, level="session", rung="end", seconds=seconds
        )
    )


# -- on the disk ------------------------------------------------------------------------------------------------


def _check_room(folder: Path, nbytes: int, min_free: int) -> None:
    free = shutil.disk_usage(folder).free
    if free - nbytes < min_free:
        raise InsufficientStorage(
            f"the session needs {nbytes >> 20} MiB and {free >> 20} MiB are free, of which --session-min-free-mib "
            f"keeps {min_free >> 20} MiB"
        )
