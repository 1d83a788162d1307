"""Snapshots of the engine for other threads. Engine thread only; what is returned is immutable."""

from __future__ import annotations

import time
from collections.abc import Sequence

from strata_core.conversations.ladder import FLOW
from strata_core.engine.core import EngineCore
from strata_core.engine.slots import Slot
from strata_core.engine.stats import ConversationInfo, EngineStats, LevelInfo, SlotInfo
from strata_core.store.base import Level


def snapshot(core: EngineCore, weights_bytes: int) -> EngineStats:
    """Counters and gauges now."""
    counters, keeper = core.counters, core.keeper
    ladder = keeper.ladder
    ram = ladder.usage(ladder.ram) if ladder.ram is not None else None
    return EngineStats(
        requests_total=dict(counters.requests),
        requests_cancelled=counters.requests["cancelled"],
        queued=len(core.waiting),
        running=sum(slot.task is not None for slot in core.slots),
        prompt_tokens_total=counters.prompt_tokens,
        read_tokens_total=counters.read_tokens,
        generated_tokens_total=counters.generated_tokens,
        drafted_tokens_total=dict(counters.drafted_tokens),
        accepted_tokens_total=dict(counters.accepted_tokens),
        reused_tokens_total=dict(counters.reused),
        reread_tokens_total=dict(counters.reread),
        parked=ram.entries if ram else 0,
        parked_bytes=ram.bytes if ram else 0,
        park_budget=ram.max_bytes if ram else None,
        evictions=ladder.counts["evictions"],
        discards=keeper.discards,
        demotions=ladder.counts["demotions"],
        superseded=ladder.counts["superseded"],
        compacted=keeper.parking.counts["compacted"],
        archived=ladder.counts["archived"],
        archive_failures=ladder.counts["archive_failures"],
        disk_evictions=ladder.counts["disk_evictions"],
        age_evictions=ladder.counts["age_evictions"],
        spilled=ladder.counts["spilled"],
        spilled_tokens=ladder.counts["spilled_tokens"],
        spilled_bytes=ladder.counts["spilled_bytes"],
        spill_failures=ladder.counts["spill_failures"],
        restore_failures=keeper.restore_failures,
        pool_pages_used=sum(pool.used for pool in keeper.pools),
        pool_pages_total=sum(pool.max_pages for pool in keeper.pools),
        pool_bytes=sum(pool.nbytes for pool in keeper.pools),
        weights_bytes=weights_bytes,
        steps_total=counters.steps,
        step_rows_total=counters.step_rows,
        step_failures=counters.step_failures,
        read_seconds=counters.read_seconds,
        generate_seconds=counters.generate_seconds,
        engine_seconds=counters.engine_seconds,
        slots=tuple(_slot_info(slot, core.options.max_context) for slot in core.slots),
        levels=level_infos(core),
        model_counts=dict(core.model.counters()),
    )


def level_infos(core: EngineCore, counting: bool = False) -> tuple[LevelInfo, ...]:
    """Fill of every level, RAM first, and of the archive; one that fails to tell is left out.

    :param counting: also go through the entries of levels, to count conversations.
    """
    infos = []
    ladder = core.keeper.ladder
    for store in ladder.stores:
        usage = ladder.usage(store)
        if usage is None:
            continue
        different, flow = None, ladder.flow.get(store.name)
        if counting and isinstance(store, Level):
            different = len({e.conversation for e in ladder.entries(store) if not e.root})
        folder = str(store.folder) if store.folder is not None else None
        infos.append(
            LevelInfo(
                store.name, store.rank, usage.bytes, usage.entries, usage.max_bytes, usage.max_entries, different,
                folder, {name: flow[name] for name in FLOW} if flow is not None else {},
            )
        )
    return tuple(infos)


def conversations(core: EngineCore) -> list[ConversationInfo]:
    """Live conversations that may be resumed, and stored entries; the most recently used first."""
    found = []
    for slot in core.slots:
        live = slot.live
        if live is not None and live.keep:
            found.append(
                ConversationInfo(
                    live.conversation, f"slot {slot.id}", len(live.tokens), created=live.created, used=live.used,
                    pinned=live.pinned, tenant=live.tenant, **_sizes(core, len(live.tokens), live.positions),
                )
            )
    for level in core.keeper.ladder.searched:
        for entry in core.keeper.ladder.entries(level):
            found.append(
                ConversationInfo(
                    entry.conversation, level.name, len(entry.tokens), created=entry.created, used=entry.used,
                    pinned=entry.pinned, tenant=entry.tenant, **_sizes(core, len(entry.tokens), entry.states),
                )
            )
    return sorted(found, key=lambda info: -info.used)


def _sizes(core: EngineCore, tokens: int, positions: Sequence[int] | None) -> dict[str, int]:
    """What so many tokens with states at these positions take."""
    keeper = core.keeper
    pages = keeper.pools[0].layout.pages_for(tokens) * sum(pool.layout.nbytes for pool in keeper.pools)
    states = len(positions or ())
    state_nbytes = states * keeper.state_pool.layout.nbytes if keeper.state_pool is not None else 0
    return {"nbytes": pages + state_nbytes, "states": states, "state_nbytes": state_nbytes}


def _state(slot: Slot) -> str:
    if slot.task is None:
        return "idle"
    return "restoring" if slot.restoring else "reading" if slot.reading else "generating"


def _slot_info(slot: Slot, context: int) -> SlotInfo:
    task = slot.task
    read_rate = generate_rate = None
    if task is not None:
        now = time.monotonic()
        read = min(slot.computed, len(task.prompt)) - task.cached
        reading_s = (task.first_token or now) - task.started
        if read > 0 and reading_s > 0:
            read_rate = read / reading_s
        if task.generated > 1 and task.first_token is not None and task.last_token is not None:
            spent = task.last_token - task.first_token
            generate_rate = (task.generated - 1) / spent if spent > 0 else None
    return SlotInfo(
        id=slot.id,
        state=_state(slot),
        request_id=task.handle.id if task else None,
        conversation=slot.live.conversation if slot.live else None,
        tokens=slot.computed,
        prompt_tokens=len(task.prompt) if task else None,
        generated=task.generated if task else None,
        context=context,
        read_rate=read_rate,
        generate_rate=generate_rate,
        tenant=task.request.tenant if task else slot.live.tenant if slot.live else "",
    )
