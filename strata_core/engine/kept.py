"""What may be done to conversations as a whole, wherever they are kept. On the engine thread, between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from strata_core.engine.slots import Slot
from strata_core.errors import InvalidRequest, NotFound
from strata_core.store.base import Entry, Level

if TYPE_CHECKING:
    from strata_core.engine.core import EngineCore


def pin(core: EngineCore, conversation: str, pinned: bool, tenant: str | None = None) -> None:
    """Set or clear the pin of all copies of a conversation.

    :param tenant: whose copies; None for everyone's.
    :raises NotFound: there is none.
    """
    lives = [s.live for s in _holding(core, conversation, tenant) if s.live is not None]
    for live in lives:
        live.pinned = pinned
    stored = _stored(core, conversation, tenant)
    for level, entry in stored:
        level.update(attrs.evolve(entry, pinned=pinned))
    if not lives and not stored:
        raise NotFound(f"no conversation {conversation!r} is kept")


def _holding(core: EngineCore, conversation: str, tenant: str | None) -> list[Slot]:
    return [
        slot
        for slot in core.slots
        if slot.live is not None
        and slot.live.conversation == conversation
        and (tenant is None or slot.live.tenant == tenant)
    ]


def _stored(core: EngineCore, conversation: str, tenant: str | None) -> list[tuple[Level, Entry]]:
    return [c for c in core.keeper.ladder.copies(conversation) if tenant is None or c[1].tenant == tenant]


def delete(core: EngineCore, conversation: str, tenant: str | None = None) -> None:
    """Forget all copies of a conversation.

    :param tenant: whose copies; None for everyone's.
    :raises NotFound: there is none. :raises InvalidRequest: a request is running in it; nothing is deleted.
    """
    slots = _holding(core, conversation, tenant)
    if any(slot.task is not None for slot in slots):
        raise InvalidRequest(f"conversation {conversation!r} is in use by a running request")
    stored = _stored(core, conversation, tenant)
    if not slots and not stored:
        raise NotFound(f"no conversation {conversation!r} is kept")
    for slot in slots:
        assert slot.live is not None
        core.keeper.forget(slot.live, "deleted")
        slot.live = None
    for level, entry in stored:
        level.remove(entry)
    core.keeper.ladder.archiving.forget(conversation, tenant)
