"""What the engine reports of itself: immutable snapshots, published between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs


@attrs.frozen
class SlotInfo:
    """One slot now. ``state`` is ``idle``, ``restoring``, ``reading`` or ``generating``; ``tokens`` are computed and
    can be resumed.

    :ivar read_rate: prompt tokens per second of the running request so far; None before that is measured.
    :ivar generate_rate: the same of generated tokens.
    :ivar tenant: whose conversation or request it holds.
    """

    id: int
    state: str
    request_id: str | None
    conversation: str | None
    tokens: int
    prompt_tokens: int | None
    generated: int | None
    context: int
    read_rate: float | None = None
    generate_rate: float | None = None
    tenant: str = ""


@attrs.frozen
class ConversationInfo:
    """A conversation that can be resumed. ``place`` is ``slot N`` or the name of a level; ``nbytes`` counts its pages
    and states, shared ones in full.

    :ivar states: positions at which a recurrent state is kept; 0 for models without such.
    :ivar state_nbytes: what these take of ``nbytes``.
    """

    id: str
    place: str
    tokens: int
    nbytes: int
    created: float
    used: float
    pinned: bool
    tenant: str
    states: int = 0
    state_nbytes: int = 0


@attrs.frozen
class LevelInfo:
    """Fill of a level; bounds are None where there are none.

    :ivar conversations: how many different ones its entries are of; None in statistics that are taken with every step.
    :ivar folder: where it keeps files, if it does.
    :ivar flow: what went in and out since the start, see :data:`strata_core.conversations.ladder.FLOW`.
    """

    name: str
    rank: int
    bytes: int
    entries: int
    max_bytes: int | None
    max_entries: int | None
    conversations: int | None = None
    folder: str | None = None
    flow: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen
class EngineStats:
    """Counters since the start and gauges of now. Tokens, bytes, seconds. None: not measured.

    :ivar requests_total: ended requests by status (``stop``, ``length``, ``cancelled``, or the code of an error).
    :ivar reused_tokens_total: prompt tokens that were not read, by source; :ivar reread_tokens_total: tokens read
        although they had been computed once, by reason.
    :ivar drafted_tokens_total: tokens guessed ahead, by kind; :ivar accepted_tokens_total: of these, those that were
        right.
    :ivar step_rows_total: rows computed, prompt and decode together.
    :ivar model_counts: what the model counts itself, see :meth:`strata_core.models.base.Model.counters`.
    """

    requests_total: Mapping[str, int]
    requests_cancelled: int
    queued: int
    running: int
    prompt_tokens_total: int
    read_tokens_total: int
    generated_tokens_total: int
    drafted_tokens_total: Mapping[str, int]
    accepted_tokens_total: Mapping[str, int]
    reused_tokens_total: Mapping[str, int]
    reread_tokens_total: Mapping[str, int]
    parked: int
    parked_bytes: int
    park_budget: int | None
    evictions: int
    discards: int
    demotions: int
    superseded: int
    compacted: int
    archived: int
    archive_failures: int
    disk_evictions: int
    age_evictions: int
    spilled: int
    spilled_tokens: int
    spilled_bytes: int
    spill_failures: int
    restore_failures: int
    pool_pages_used: int
    pool_pages_total: int
    pool_bytes: int
    weights_bytes: int
    steps_total: int
    step_rows_total: int
    step_failures: int
    read_seconds: float
    generate_seconds: float
    engine_seconds: float
    slots: tuple[SlotInfo, ...] = ()
    levels: tuple[LevelInfo, ...] = ()
    model_counts: Mapping[str, int] = attrs.field(factory=dict)


@attrs.define
class Counters:
    """The engine thread's running totals; names as in :class:`EngineStats`."""

    requests: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    reused: Counter[str] = attrs.field(factory=Counter)
    reread: Counter[str] = attrs.field(factory=Counter)
    drafted_tokens: Counter[str] = attrs.field(factory=Counter)
    accepted_tokens: Counter[str] = attrs.field(factory=Counter)
    steps: int = 0
    step_rows: int = 0
    step_failures: int = 0
    read_seconds: float = 0.0
    generate_seconds: float = 0.0
    engine_seconds: float = 0.0
