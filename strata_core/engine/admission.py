"""Giving a request its slot: find what it resumes from, put away what the slot held, restore, begin."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from strata_core.conversations.index import Query
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate, SlotView, choose_slot
from strata_core.conversations.tokens import common_prefix
from strata_core.engine.requests import RequestHandle, Reread, Started
from strata_core.engine.sampling import Sampler
from strata_core.engine.slots import Slot, Task
from strata_core.engine.text import ReplyText
from strata_core.pool.table import HeldPages
from strata_core.tokens.tokenizer import Tokenizer


class Admission:
    """Starts requests in slots. Engine thread only."""

    def __init__(self, keeper: Keeper, tokenizer: Tokenizer, slots: Sequence[Slot], max_context: int):
        self._keeper = keeper
        self._tokenizer = tokenizer
        self._slots = slots
        self._max_context = max_context

    def start(self, handle: RequestHandle, free: Sequence[Slot]) -> None:
        """Begin a request in one of the free slots, resuming as much as can be resumed."""
        request = handle.request
        query = self._keeper.query(request.tenant, request.prompt)
        excluded: frozenset[str] = frozenset()
        while True:
            candidate = self._find(handle, query, excluded)
            slot = self._choose(free, query, candidate)
            begin = time.perf_counter()
            live = self._occupy(slot, candidate, handle)
            if live is not None:
                break
            assert candidate is not None and candidate.found is not None
            excluded |= {candidate.found.entry.id}
        slot.live = live
        live.pinned = live.pinned or request.pin
        task = self._task(handle, query, candidate, slot)
        task.restore_s = time.perf_counter() - begin if candidate is not None else None
        live.prompt = len(task.prompt)
        self._explain(task, candidate)
        slot.task = task
        handle.put(Started(len(task.prompt), task.cached, candidate.source if candidate else None))

    def restart(self, slot: Slot, task: Task) -> None:
        """Begin a request again from token 0, in the slot it has, after what it resumed from proved unusable."""
        request = task.request
        live = Live.begin(self._keeper.identity, request.tenant, self._keeper.pools, self._page_tokens)
        live.keep, live.pinned, live.prompt = request.cache, request.pin, len(request.prompt)
        slot.live = live
        task.reread = (*task.reread, Reread(task.cached, "damaged"))
        task.why = "damaged"
        task.prompt, task.cached, task.reused = request.prompt, 0, type(task.reused)()
        task.limit = self._limit(request.max_tokens, len(task.prompt))
        task.handle.put(Started(len(task.prompt), 0, None))

    def _find(self, handle: RequestHandle, query: Query, excluded: frozenset[str]) -> Candidate | None:
        if not handle.request.cache:
            return None
        lives = [(slot.live, slot.task is not None) for slot in self._slots if slot.live is not None]
        return self._keeper.find(query, lives, excluded)

    def _choose(self, free: Sequence[Slot], query: Query, candidate: Candidate | None) -> Slot:
        views = []
        for slot in free:
            live, shared = slot.live, 0
            if live is not None and candidate is not None and candidate.live is live:
                shared = candidate.shared
            elif live is not None and live.keep and live.identity.digest == query.identity:
                shared = common_prefix(live.tokens.view(), query.tokens)
            views.append(
                SlotView(
                    slot.id, slot.computed, live.prompt if live else 0, live.used if live else 0.0, shared,
                )
            )
        chosen = choose_slot(views, candidate.shared if candidate else 0)
        return next(slot for slot in free if slot.id == chosen)

    def _occupy(self, slot: Slot, candidate: Candidate | None, handle: RequestHandle) -> Live | None:
        """Park what the slot holds and put there what the request resumes from; None when that cannot be restored."""
        own = candidate is not None and candidate.live is not None and candidate.live is slot.live
        if own and candidate is not None and candidate.shared == slot.computed:
            return slot.live  # the conversation goes on where it is
        try:
            pages: HeldPages | None = None
            if candidate is not None and candidate.live is not None:
                # Held before the slot is cleared: its own conversation may be what is resumed from.
                pages = self._keeper.restore(candidate)
            if slot.live is not None:
                self._keeper.park(slot.live, "rewind" if own else "switch")
                slot.live = None
            if candidate is not None and candidate.found is not None:
                pages = self._keeper.restore(candidate)
                if pages is None:
                    return None
            return self._begin(candidate, pages, handle)
        finally:
            if candidate is not None:
                self._keeper.release(candidate)

    def _begin(self, candidate: Candidate | None, pages: HeldPages | None, handle: RequestHandle) -> Live:
        request = handle.request
        live = Live.begin(self._keeper.identity, request.tenant, self._keeper.pools, self._page_tokens)
        live.keep = request.cache
        if candidate is not None and pages is not None:
            live.adopt(pages, candidate.prompt[: candidate.shared])
            pages.release()
            if candidate.found is not None and candidate.shared == len(candidate.found.entry.tokens):
                live.conversation = candidate.found.entry.conversation
                live.created = candidate.found.entry.created
                live.pinned = candidate.found.entry.pinned
                self._keeper.take(candidate)
        return live

    def _task(self, handle: RequestHandle, query: Query, candidate: Candidate | None, slot: Slot) -> Task:
        request = handle.request
        prompt = candidate.prompt if candidate is not None else request.prompt
        task = Task(
            handle=handle,
            prompt=np.ascontiguousarray(prompt, np.int32),
            query=query,
            limit=self._limit(request.max_tokens, len(prompt)),
            sampler=Sampler(request.sampling, prompt),
            text=ReplyText(self._tokenizer, request.stop, request.visible),
            slot=slot.id,
        )
        if candidate is not None:
            task.cached = candidate.shared
            task.reused[candidate.source] = candidate.shared
            task.origin = candidate.found
        return task

    def _explain(self, task: Task, candidate: Candidate | None) -> None:
        lost, reason = self._keeper.explain(task.query, task.cached) if task.request.cache else (0, "")
        lost = min(lost, len(task.prompt) - task.cached)
        if lost > 1 or (lost == 1 and task.cached + 1 < len(task.prompt)):  # the last token is always read
            task.reread = (Reread(lost, reason),)
            task.why = reason
        elif candidate is None:
            task.why = "never stored"
        elif candidate.at is not None:
            task.why = f"diverged at position {candidate.at}"
        else:
            task.why = "new text"

    def _limit(self, max_tokens: int | None, prompt: int) -> int:
        room = max(1, self._max_context - prompt)
        return room if max_tokens is None else min(max_tokens, room)

    @property
    def _page_tokens(self) -> int:
        return self._keeper.pools[0].layout.page_tokens
