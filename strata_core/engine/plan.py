"""What memory the settings ask for, checked against what there is, before any of it is taken. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from strata_core.errors import OutOfMemory, SettingsError

if TYPE_CHECKING:
    from strata_core.settings.core import Settings

#: The least context that is worth serving when it is chosen automatically.
LEAST_CONTEXT = 256
MIB = 1 << 20


@attrs.frozen
class MemoryPlan:
    """How much each part may use.

    :ivar max_context: tokens of a sequence, at most.
    :ivar device_pages: pages of each of the engine's pools; parked ones included where they stay there.
    :ivar host_pages: pages for parked copies in host memory; 0 where parking refers to the engine's own pages.
    :ivar state_pages: recurrent states in the engine's own memory; :ivar host_state_pages: in the host's, for parked
        copies.
    :ivar ram_budget: bytes that parked conversations may hold.
    :ivar snapshots_fit: whether RAM can hold one full conversation per slot beside the parking floor.
    :ivar notes: lines for the log: the arithmetic, and what was made smaller.
    """

    max_context: int
    device_pages: int
    host_pages: int
    state_pages: int
    host_state_pages: int
    ram_budget: int
    snapshots_fit: bool
    notes: tuple[str, ...]


def plan_memory(
    settings: Settings,
    *,
    block_bytes: int,
    model_context: int,
    available: int | None,
    host_available: int | None,
    host_memory: bool,
    state_bytes: int = 0,
) -> MemoryPlan:
    """Decide context and RAM budget.

    :param block_bytes: bytes of ``page_tokens`` positions in all pools.
    :param state_bytes: bytes of a recurrent state; 0 for models without.
    :param available: bytes free where pages live, after the weights; None where unknown.
    :param host_available: bytes free in the host's memory; None where unknown.
    :param host_memory: whether pages live in the host's memory.
    :raises OutOfMemory: an explicit context does not fit; the message has the arithmetic.
    :raises SettingsError: it is longer than the model's.
    """
    floor = settings.conversation_cache_min_free_mib * MIB if host_memory else 0
    usable = None if available is None else max(0, available - floor)
    # Of each slot: the states it keeps, the one at its end, and the one that a step writes next.
    states = settings.parallel * (settings.prompt_cache + 2) if state_bytes else 0
    room = None if usable is None else max(0, usable - states * state_bytes)
    context = _context(settings, block_bytes, model_context, room, floor, states * state_bytes)
    slots = settings.parallel * _pages(context, settings.page_tokens)
    live = slots * block_bytes + states * state_bytes
    kept = f" and {settings.prompt_cache + 2} states each" if state_bytes else ""
    notes = [
        f"memory plan: {settings.parallel} slots x {context} tokens{kept} use at most {live // MIB} MiB; "
        f"{_mib(available)} available, {floor // MIB} MiB kept free"
    ]
    spare = _spare(settings, host_available, live, host_memory)
    budget = _budget(settings, spare, notes)
    parked_pages = budget // block_bytes
    # A page beyond the tables for each slot: the copy that is made before a shared page is written.
    own = slots + settings.parallel
    fit = spare is not None and live <= spare
    parked_states = budget // state_bytes if state_bytes else 0
    if host_memory:
        return MemoryPlan(context, own + parked_pages, 0, states + parked_states, 0, budget, fit, tuple(notes))
    return MemoryPlan(context, own, parked_pages, states, parked_states, budget, fit, tuple(notes))


def _context(
    settings: Settings, block_bytes: int, model_context: int, usable: int | None, floor: int, states: int
) -> int:
    """
    :param usable: bytes free for pages; :param floor: those that stay free; :param states: those that states take.
    """
    size, slots = settings.page_tokens, settings.parallel
    stretched = int(model_context * settings.rope_scale) if settings.rope_scale > 1 else model_context
    wanted = settings.max_context or stretched
    if wanted > stretched:
        raise SettingsError(
            f"max_context {wanted} is more than the model's {stretched} tokens; rope_scaling and rope_scale stretch it",
            param="max_context",
        )
    if usable is None or slots * _pages(wanted, size) * block_bytes <= usable:
        return wanted
    fits = usable // (slots * block_bytes) * size
    if not settings.max_context and fits >= min(LEAST_CONTEXT, wanted):
        return min(fits, wanted)
    needed = slots * _pages(settings.max_context or LEAST_CONTEXT, size) * block_bytes
    kept, lower = "", "max_context, parallel"
    if states:
        kept = f" and {states // MIB} MiB for {settings.prompt_cache + 2} recurrent states each"
        lower += ", prompt_cache"
    raise OutOfMemory(
        f"{slots} slots x {settings.max_context or LEAST_CONTEXT} tokens need {needed // MIB} MiB; {usable // MIB} MiB "
        f"are free beside {floor // MIB} MiB that stay free{kept}; lower {lower} or "
        "conversation_cache_min_free_mib, or take a smaller K/V type"
    )


def _spare(settings: Settings, host_available: int | None, live: int, host_memory: bool) -> int | None:
    """Bytes of host memory beside the slots' pages and the parking floor."""
    if host_available is None:
        return None
    floor = settings.conversation_cache_min_free_mib * MIB
    return max(0, host_available - floor - (live if host_memory else 0))


def _budget(settings: Settings, spare: int | None, notes: list[str]) -> int:
    if not settings.conversation_cache or not settings.conversation_cache_slots:
        return 0
    if settings.conversation_cache_disk_only:
        return 0
    wanted = settings.conversation_cache_mib
    if wanted is None:
        budget = 0 if spare is None else spare // 2
        notes.append(f"RAM for parked conversations: auto -> {budget // MIB} MiB (half of {_mib(spare)} to spare)")
        return budget
    budget = wanted * MIB
    if spare is not None and budget > spare:
        notes.append(f"RAM for parked conversations: {wanted} MiB asked for, lowered to the {_mib(spare)} to spare")
        return spare
    return budget


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def _mib(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes // MIB} MiB"
