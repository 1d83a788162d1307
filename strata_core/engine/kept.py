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
    """Forget all copies of a conversation, and the roots that no other one begins with.

    :param tenant: whose copies; None for everyone's.
    :raises NotFound: there is none. :raises InvalidRequest: a request is running in it; nothing is deleted.
    """
    slots = _holding(core, conversation, tenant)
    if any(slot.task is not None for slot in slots):
        raise InvalidRequest(f"conversation {conversation!r} is in use by a running request")
    stored = _stored(core, conversation, tenant)
    if not slots and not stored:
        raise NotFound(f"no conversation {conversation!r} is kept")
    addresses = [entry.addresses for _, entry in stored]
    for slot in slots:
        assert slot.live is not None
        addresses.append(slot.live.addresses())
        core.keeper.forget(slot.live, "deleted")
        slot.live = None
    for level, entry in stored:
        level.remove(entry)
    _delete_roots(core, addresses)
    core.keeper.ladder.archiving.forget(conversation, tenant)


def _delete_roots(core: EngineCore, deleted: list[tuple[bytes, ...]]) -> None:
    """Delete the roots that only deleted conversations began with.

    What is kept as the beginning of conversations may be the first message itself, where no long system prompt comes
    before it: left behind, it could still be resumed and read.

    :param deleted: addresses of the complete pages of each copy.
    """
    ladder = core.keeper.ladder
    entries = [entry for level in ladder.searched for entry in ladder.entries(level)]
    others = [entry.addresses for entry in entries if not entry.root]
    others += [slot.live.addresses() for slot in core.slots if slot.live is not None]
    # An address stands for everything before it, so one comparison tells whether a root is a beginning.
    gone, needed = ({address for copy in copies for address in copy} for copies in (deleted, others))
    going = {e.id: e for e in entries if e.root and e.addresses[-1] in gone and e.addresses[-1] not in needed}
    ladder.discard(list(going.values()))
