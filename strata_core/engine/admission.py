"""Giving a request its slot: find what it resumes from, put away what the slot held, restore, begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strata_core.compute.scoring import Scoring
from strata_core.conversations.compaction import header_end
from strata_core.conversations.index import Query
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate, SlotView, choose_slot
from strata_core.conversations.tokens import common_prefix
from strata_core.engine.drafts import NO_DRAFTS, Drafter
from strata_core.engine.requests import RequestHandle, Reread, Started
from strata_core.engine.sampling import Sampler
from strata_core.engine.slots import Slot, Task
from strata_core.engine.text import ReplyText
from strata_core.tokens.tokenizer import Tokenizer

#: How often a level may refuse a request what it still lists. Where thousands of entries begin alike and none can be
#: read just now, asking for all of them would take longer than reading the prompt.
MOST_REFUSALS = 3


class Admission:
    """Starts requests in slots. Engine thread only.

    :param drafts: most tokens of a draft, by its kind.
    :param scoring: what samplers compute with.
    """

    def __init__(
        self,
        keeper: Keeper,
        tokenizer: Tokenizer,
        slots: Sequence[Slot],
        max_context: int,
        drafts: Mapping[str, int] = NO_DRAFTS,
        scoring: Scoring | None = None,
    ):
        self._keeper = keeper
        self._tokenizer = tokenizer
        self._slots = slots
        self._max_context = max_context
        self._drafts = drafts
        self._scoring = Scoring() if scoring is None else scoring

    def start(self, handle: RequestHandle, free: Sequence[Slot]) -> None:
        """Give a request one of the free slots, and begin to resume as much as can be resumed.

        The slot reads its prompt at once, or after :meth:`poll` when something is being restored first.
        """
        request = handle.request
        query = self._keeper.query(request.tenant, request.prompt)
        candidate = self._find(handle, query)
        slot = self._choose(free, query, candidate)
        slot.task = Task(
            handle=handle,
            prompt=request.prompt,
            query=query,
            limit=self._limit(request.max_tokens, len(request.prompt)),
            sampler=Sampler(request.sampling, request.prompt, self._scoring),
            text=ReplyText(self._tokenizer, request.stop, request.visible),
            slot=slot.id,
            drafters={kind: Drafter(most) for kind, most in self._drafts.items()},
        )
        try:
            self._resume(slot, slot.task, candidate)
        except BaseException:
            self.abandon(slot.task)
            slot.task = None
            raise

    def poll(self, slot: Slot) -> None:
        """Go on with a request whose restore is done."""
        task = slot.task
        if task is None or task.restore is None or not task.restore.done():
            return
        if not self._finish(slot, task):
            self._resume(slot, task, self._find_other(task))

    def abandon(self, task: Task) -> None:
        """The request ends while something is being restored for it."""
        if task.restore is not None and task.candidate is not None:
            self._keeper.restorer.abandon(task.restore)
            self._keeper.release(task.candidate)
            task.restore = None

    def restart(self, slot: Slot, task: Task) -> None:
        """Begin a request again from token 0, in the slot it has, after what it resumed from proved unusable."""
        request = task.request
        live = self._empty(task.handle)
        live.pinned, live.prompt = request.pin, len(request.prompt)
        live.plan(request.prompt, request.prefix)
        slot.live = live
        task.reread = (*task.reread, Reread(task.cached, "damaged"))
        task.why = "damaged"
        task.prompt, task.cached, task.reused = request.prompt, 0, type(task.reused)()
        task.limit = self._limit(request.max_tokens, len(task.prompt))
        task.handle.put(Started(len(task.prompt), 0, None))

    def _find(
        self,
        handle: RequestHandle,
        query: Query,
        excluded: frozenset[str] = frozenset(),
        without: frozenset[str] = frozenset(),
    ) -> Candidate | None:
        if not handle.request.cache:
            return None
        lives = [(slot.live, slot.task is not None) for slot in self._slots if slot.live is not None]
        return self._keeper.find(query, lives, excluded, without)

    def _find_other(self, task: Task) -> Candidate | None:
        """What a request resumes from, now that something could not be restored."""
        without = frozenset(level for level, times in task.refusals.items() if times >= MOST_REFUSALS)
        return self._find(task.handle, task.query, task.excluded, without)

    def _choose(self, free: Sequence[Slot], query: Query, candidate: Candidate | None) -> Slot:
        views = []
        for slot in free:
            live, shared = slot.live, 0
            if live is not None and live.keep and live.identity.digest == query.identity:
                shared = common_prefix(live.tokens.view(), query.tokens)
            if live is not None and candidate is not None and candidate.live is live:
                shared = max(shared, candidate.shared)  # more after a text match, less where there is no state
            views.append(
                SlotView(
                    slot.id, slot.computed, live.prompt if live else 0, live.used if live else 0.0, shared,
                )
            )
        chosen = choose_slot(views, candidate.shared if candidate else 0)
        return next(slot for slot in free if slot.id == chosen)

    def _resume(self, slot: Slot, task: Task, candidate: Candidate | None) -> None:
        """Resume from the best candidate that can be had. Each one that cannot is left out of the next search, unless
        its level has put the damage out of reach and offers the rest."""
        while candidate is not None and candidate.found is not None:
            if not self._keeper.restorer.refers(candidate.found):
                self._clear(slot, "switch")  # the pages to restore to may have to come from here
            task.candidate, task.restore = candidate, self._keeper.begin_restore(candidate)
            if task.restore is None:
                self._give_up(task)
            elif not task.restore.done() or self._finish(slot, task):
                return
            candidate = self._find_other(task)
        self._read(slot, task, candidate, self._branch(slot, task, candidate))

    def _branch(self, slot: Slot, task: Task, candidate: Candidate | None) -> Live:
        """What a request goes on with that resumes from a live conversation, or from none."""
        own = candidate is not None and candidate.live is not None and candidate.live is slot.live
        if own and candidate is not None and slot.live is not None and candidate.shared == slot.computed:
            return slot.live  # the conversation goes on where it is
        live = self._empty(task.handle)
        if candidate is not None and candidate.live is not None:
            # Held before the slot is cleared: its own conversation may be what is resumed from.
            source = candidate.live
            pages = self._keeper.hold(candidate)
            self._inherit(live, source.conversation, source.turns(), candidate.shared)
            live.adopt(pages, candidate.prompt[: candidate.shared])
            pages.release()
        self._clear(slot, "rewind" if own else "switch")
        return live

    def _finish(self, slot: Slot, task: Task) -> bool:
        """Take over what was restored. False when that failed."""
        candidate, restore = task.candidate, task.restore
        assert candidate is not None
        assert candidate.found is not None
        assert restore is not None
        pages = self._keeper.finish_restore(candidate, restore)
        if pages is None:
            self._give_up(task)
            return False
        entry = candidate.found.entry
        live = self._empty(task.handle)
        live.adopt(pages, candidate.prompt[: candidate.shared])
        pages.release()
        if candidate.shared == len(entry.tokens) and not entry.root:
            live.conversation, live.created, live.pinned = entry.conversation, entry.created, entry.pinned
            self._keeper.take(candidate)
        elif not entry.root:
            self._inherit(live, entry.conversation, entry.turns, candidate.shared)
        task.restore_s = self._keeper.clock.monotonic() - restore.started
        task.restore = None
        self._keeper.release(candidate)
        # If it was not parked before, it is now that what takes its place no longer counts against the RAM budget:
        # two conversations that change places must not need room for both.
        self._clear(slot, "switch")
        self._read(slot, task, candidate, live)
        return True

    def _give_up(self, task: Task) -> None:
        assert task.candidate is not None
        assert task.candidate.found is not None
        found = task.candidate.found
        self._keeper.release(task.candidate)
        if not self._keeper.cut_short(found):
            task.excluded |= {found.entry.id}
            if self._keeper.ladder.holds(found.level, found.entry):  # one that is gone says nothing of the others
                task.refusals[found.level.name] += 1
        task.candidate = task.restore = None

    def _read(self, slot: Slot, task: Task, candidate: Candidate | None, live: Live) -> None:
        """Everything to be resumed is in place: read the rest of the prompt."""
        request = task.request
        if candidate is not None:
            task.prompt = np.ascontiguousarray(candidate.prompt, np.int32)
            task.limit = self._limit(request.max_tokens, len(task.prompt))
            task.cached = candidate.shared
            task.reused[candidate.source] = candidate.shared
            task.origin = candidate.found
        live.pinned = live.pinned or request.pin
        live.prompt = len(task.prompt)
        live.plan(task.prompt, request.prefix)
        slot.live = live
        self._explain(task, candidate)
        task.handle.put(Started(len(task.prompt), task.cached, candidate.source if candidate else None))

    def _clear(self, slot: Slot, reason: str) -> None:
        if slot.live is not None:
            live, slot.live = slot.live, None
            self._keeper.park(live, reason)

    def _empty(self, handle: RequestHandle) -> Live:
        keeper = self._keeper
        live = keeper.begin(handle.request.tenant)
        live.keep = handle.request.cache
        return live

    @staticmethod
    def _inherit(live: Live, conversation: str, turns: Sequence[int], shared: int) -> None:
        """A branch that shares the header (system prompt and first user turn) is the same conversation, gone on
        differently; one that shares less is another conversation."""
        header = header_end(turns)
        if header is not None and shared >= header:
            live.conversation = conversation

    def _explain(self, task: Task, candidate: Candidate | None) -> None:
        if not (task.request.cache and self._keeper.options.enabled):
            task.why = "reuse is off"
            return
        lost, reason = self._keeper.explain(task.query, task.cached)
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
