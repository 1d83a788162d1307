"""Slots and the requests that run in them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import attrs
import numpy as np

from strata_core.conversations.index import Query
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.ladder import Found
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate
from strata_core.conversations.restoring import Restore
from strata_core.engine.drafts import Drafter
from strata_core.engine.requests import Request, RequestHandle, RequestRecord, Reread
from strata_core.engine.sampling import Sampler
from strata_core.engine.text import ReplyText


@attrs.define(eq=False)
class Task:
    """A request in a slot.

    :ivar prompt: ids to read: the request's, or a respelling that a text match gave.
    :ivar limit: most tokens it may generate.
    :ivar pending: what the next step computes: the token sampled last, and before it those whose state went past them;
        None while the prompt is read.
    :ivar drafters: how guesses of what follows fare, by their kind.
    :ivar origin: the stored entry it resumed from, if any: suspect if its first step fails.
    :ivar restore: what is being brought back before the prompt is read, and ``candidate`` what for; ``excluded`` are
        entries that could not be, ``refusals`` how often each level refused one that it still has.
    :ivar starved: steps in a row in which it got no prompt rows.
    """

    handle: RequestHandle
    prompt: np.ndarray
    query: Query
    limit: int
    sampler: Sampler
    text: ReplyText
    slot: int
    drafters: Mapping[str, Drafter]
    cached: int = 0
    generated: int = 0
    pending: np.ndarray | None = None
    starved: int = 0
    origin: Found | None = None
    candidate: Candidate | None = None
    restore: Restore | None = None
    excluded: frozenset[str] = frozenset()
    refusals: Counter[str] = attrs.field(factory=Counter)
    reused: Counter[str] = attrs.field(factory=Counter)
    reread: tuple[Reread, ...] = ()
    why: str = ""
    restore_s: float | None = None
    started: float = attrs.field(factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None

    @property
    def request(self) -> Request:
        return self.handle.request

    def record(self, status: str, read: int) -> RequestRecord:
        """The ledger of this request as it is now; ``read`` prompt tokens were computed."""
        now = time.monotonic()
        until = self.first_token if self.first_token is not None else now
        generate = (
            self.last_token - self.first_token
            if self.first_token is not None and self.last_token is not None
            else None
        )
        return RequestRecord(
            id=self.handle.id,
            status=status,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            read_tokens=read,
            generated_tokens=self.generated,
            reused=dict(self.reused),
            reread=self.reread,
            created=self.handle.created,
            queued_s=self.started - self.handle.submitted,
            restore_s=self.restore_s,
            read_s=until - self.started,
            generate_s=generate,
            slot=self.slot,
            why=self.why,
            tenant=self.request.tenant,
            drafted_tokens=sum(one.drafted for one in self.drafters.values()),
            accepted_tokens=sum(one.accepted for one in self.drafters.values()),
            drafts={kind: (one.drafted, one.accepted) for kind, one in self.drafters.items() if one.drafted},
        )


@attrs.define(eq=False)
class Slot:
    """A place for one sequence: what it holds, and the request that runs there. Empty: neither.

    :ivar reserved: no request may begin here, as a session is being restored to it.
    """

    id: int
    live: Live | None = None
    task: Task | None = None
    reserved: bool = False

    @property
    def free(self) -> bool:
        """Whether a request may begin here."""
        return self.task is None and not self.reserved

    @property
    def reading(self) -> bool:
        return self.task is not None and self.task.pending is None and self.task.restore is None

    @property
    def restoring(self) -> bool:
        return self.task is not None and self.task.restore is not None

    def vacate(self, keeper: Keeper) -> None:
        """The request has left. What it computed stays until something else takes the slot, where it may be kept."""
        self.task = None
        if self.live is None:
            return
        self.live.used = keeper.clock.time()
        if not self.live.keep or not self.computed or not keeper.options.enabled:
            self.live.release()
            self.live = None

    @property
    def computed(self) -> int:
        """Tokens whose K/V the slot holds."""
        return 0 if self.live is None else len(self.live.tokens)
