"""Finds, restores and parks conversations, and keeps the ledger of why tokens are read again.

The engine asks it four things: which computed sequence a prompt can resume from (:meth:`Keeper.find`), the pages to
resume with (:meth:`Keeper.begin_restore`, :meth:`Keeper.finish_restore`), to put away what leaves a slot
(:meth:`Keeper.park`), and why tokens had to be read that had been computed before (:meth:`Keeper.explain`). It knows
nothing of requests or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from strata_core.clock import Clock
from strata_core.conversations.ghosts import Ghost, Ghosts
from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import Query
from strata_core.conversations.ladder import Found, Ladder
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate, best_live, choose
from strata_core.conversations.options import KeeperOptions
from strata_core.conversations.parking import Parking, placement
from strata_core.conversations.placement import Placement, Verdict
from strata_core.conversations.restoring import Restore, Restorer
from strata_core.errors import DamagedEntry, LevelError, OutOfMemory
from strata_core.events import ConversationEvicted, ConversationRestored, Event, LevelWarning
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages
from strata_core.store.base import Archive, Entry, Level

log = logging.getLogger("strata.cache")


class Keeper:
    """See the module's docstring.

    :param openers: ids of the tokens that open a turn.
    :param copies: whether parking to RAM copies pages, because the engine's own are on a device.
    :param spell: bytes of an ordinary token, None for a control token.
    :param available: bytes of memory available now; None where unknown.
    :param admit: the admission rules.
    :param emit: takes events for observers.
    :param clock: what time it is; the system's if None.
    :param reader: runs the reading of restores; see :class:`Restorer`.
    :param state_pool: for recurrent states; None for models without.
    :param archive: takes what is superseded or compacted; None where that is deleted.
    :ivar read_rate: prompt tokens per second as observed, set by the engine; None before it is measured.
    """

    def __init__(
        self,
        identity: Identity,
        pools: Sequence[PagePool],
        levels: Sequence[Level],
        options: KeeperOptions,
        *,
        openers: frozenset[int],
        copies: bool,
        max_context: int,
        spell: Callable[[int], bytes | None],
        available: Callable[[], int | None],
        admit: Callable[[Placement], Verdict],
        emit: Callable[[Event], None],
        clock: Clock | None = None,
        reader: Executor | None = None,
        archive: Archive | None = None,
        state_pool: PagePool | None = None,
    ):
        self.identity = identity
        self.state_pool = state_pool
        self.clock = clock or Clock()
        self.pools = tuple(pools)
        self.options = options
        self.openers = openers
        self.page_tokens = pools[0].layout.page_tokens
        self.read_rate: float | None = None
        self.restore_failures = 0
        self.ladder = Ladder(levels, self._on_left, self._on_trouble, self.page_tokens, self.clock, archive)
        self._copies = copies
        self._max_context = max_context
        self._spell = spell
        self._admit = admit
        self._emit = emit
        self._ghosts = Ghosts()
        self._warned: dict[str, float] = {}
        self.parking = Parking(self.ladder, options, copies, available, self._ask, self._on_left, emit, self.clock)
        self.restorer = Restorer(pools, options, available, self._ask, self.reclaim, self.clock, reader, state_pool)
        self.ladder.fetch = self.restorer.fetch

    @property
    def discards(self) -> int:
        """Conversations that nothing could keep."""
        return self.parking.counts["discards"]

    def begin(self, tenant: str) -> Live:
        """An empty conversation."""
        live = Live.begin(
            self.identity, tenant, self.pools, self.openers, self.state_pool, self.options.checkpoints
        )
        live.created = live.used = self.clock.time()
        return live

    # -- looking up ---------------------------------------------------------------------------------------------

    def query(self, tenant: str, tokens: np.ndarray) -> Query:
        """A prompt as levels look it up, under the identity of its tenant."""
        identity = self.identity.for_tenant(tenant)
        return Query(identity.digest, tokens, page_addresses(identity, tokens, self.page_tokens))

    def find(
        self,
        query: Query,
        lives: Sequence[tuple[Live, bool]],
        excluded: frozenset[str] = frozenset(),
        without: frozenset[str] = frozenset(),
    ) -> Candidate | None:
        """What a prompt resumes from, or None. A stored entry it names is guarded until :meth:`release`.

        :param lives: what the slots hold, and whether each is busy.
        :param excluded: ids of entries whose restore failed for this prompt.
        :param without: names of levels that are not to be asked for it.
        """
        if not self.options.enabled:
            return None
        live = best_live(lives, query.identity, query.tokens)
        while True:
            found = self.ladder.find(query, excluded, without)
            candidate = choose(live, found, query.tokens, self.options.rules, self._spell, self._max_context)
            if candidate is None or candidate.found is None:
                return candidate
            if self._worth(candidate, live.shared if live is not None else 0):
                self.ladder.guard(candidate.found.entry)
                return candidate
            # A level's other candidates share no more, so they gain no more for what they cost.
            without |= {candidate.found.level.name}

    def _worth(self, candidate: Candidate, otherwise: int) -> bool:
        """Whether restoring is expected to be faster than reading, as far as both are known."""
        found = candidate.found
        if found is None or found.level.rank == 0 or not self.options.weigh_restores:
            return True
        prices = self.restorer.prices(found, candidate.shared, otherwise, self.read_rate)
        if not prices.worth:
            tokens, read, restore = candidate.shared - otherwise, prices.read_s or 0.0, prices.restore_s or 0.0
            log.info(
                "ladder: rung %s refused (reading %d tokens takes %.0f ms, restoring them %.0f ms)",
                found.level.name, tokens, 1e3 * read, 1e3 * restore,
            )
        return prices.worth

    def release(self, candidate: Candidate) -> None:
        """End the protection that :meth:`find` gave."""
        if candidate.found is not None:
            self.ladder.unguard(candidate.found.entry)

    def hold(self, candidate: Candidate) -> HeldPages:
        """Pages of a live conversation that a request branches off, held for the caller."""
        assert candidate.live is not None
        pages = candidate.live.hold(candidate.shared)
        if candidate.live.states is not None:
            candidate.live.states.touch(candidate.shared)
        self._restored(candidate, candidate.live.conversation, 0.0)
        return pages

    def begin_restore(self, candidate: Candidate) -> Restore | None:
        """Start to bring a stored entry's pages back; None when that cannot even begin."""
        assert candidate.found is not None
        try:
            return self.restorer.begin(candidate.found, candidate.shared)
        except (LevelError, OutOfMemory) as error:
            self.refused(candidate.found, error)
            return None

    def finish_restore(self, candidate: Candidate, restore: Restore) -> HeldPages | None:
        """The pages of a restore that is done, held for the caller; None when it failed, which changed nothing."""
        assert candidate.found is not None
        try:
            pages = self._resumable(self.restorer.finish(restore))
        except (LevelError, OutOfMemory) as error:
            self.refused(candidate.found, error)
            return None
        self.ladder.touch(candidate.found)
        self.ladder.count_restored(candidate.found.level, candidate.shared)
        self._restored(candidate, candidate.found.entry.conversation, self.clock.monotonic() - restore.started)
        return pages

    def _resumable(self, pages: HeldPages) -> HeldPages:
        """:raises LevelError: a model with recurrent state cannot go on from these; they are released."""
        if self.state_pool is None or (pages.states is not None and pages.tokens in pages.states.positions):
            return pages
        tokens = pages.tokens
        pages.release()
        raise LevelError(f"what came back has no state at position {tokens}")

    def _restored(self, candidate: Candidate, conversation: str, elapsed: float) -> None:
        log.info(
            "restored %d tokens (%s)/(%s) in %.1f ms",
            candidate.shared, candidate.source, candidate.rung, 1e3 * elapsed,
        )
        self._emit(
            ConversationRestored(
                conversation=conversation,
                tokens=candidate.shared,
                level=candidate.source,
                rung=candidate.rung,
                seconds=elapsed,
            )
        )

    def take(self, candidate: Candidate) -> None:
        """The whole of a stored entry is live again in memory: its parked copy, which only refers to the same pages,
        goes. Copies on other media stay."""
        if candidate.found is None or candidate.shared < len(candidate.found.entry.tokens):
            return
        if candidate.found.level.rank == 0:
            with self.ladder.tolerating(candidate.found.level):
                candidate.found.level.remove(candidate.found.entry)

    def reclaim(self) -> bool:
        """Get back pages of the engine's pools that conversations hold beside the slots. False when none can be.

        First those that background work still reads; then those of the oldest conversation in RAM, where these are in
        the same pools.
        """
        used = self._pages_used()
        if self.ladder.settle():
            self.poll()  # the work's pages come back with its outcomes
            if self._pages_used() < used:
                return True
        return not self._copies and self.ladder.shed()

    def _pages_used(self) -> int:
        states = 0 if self.state_pool is None else self.state_pool.used
        return states + sum(pool.used for pool in self.pools)

    def refused(self, found: Found, error: Exception) -> None:
        """Note that a stored entry could not be read."""
        self.restore_failures += 1
        log.info("ladder: rung %s refused (%s)", found.level.name, error)
        if isinstance(error, DamagedEntry):
            # The level has put it out of reach; what it knew is gone.
            self._on_left(found.entry, found.level.name, "damaged")

    def cut_short(self, found: Found) -> bool:
        """Whether the level holds less of an entry now than when it was found: what was damaged is out of reach, and
        what precedes it can be resumed from."""
        now = next((e for e in self.ladder.entries(found.level) if e.id == found.entry.id), None)
        if now is None:
            return False
        return len(now.tokens) < len(found.entry.tokens) or len(now.states or ()) < len(found.entry.states or ())

    # -- putting away -------------------------------------------------------------------------------------------

    def park(self, live: Live, reason: str) -> None:
        """Put away what leaves a slot, then release it. What nothing takes is a counted discard."""
        tokens = len(live.tokens)
        if tokens and live.keep and self.options.enabled:
            pages = live.hold(tokens)
            try:
                self.parking.park(live.entry(reason), pages)
            finally:
                pages.release()
        live.release()

    def poll(self) -> None:
        """Called between steps: follow what levels and abandoned restores have completed."""
        self.parking.poll()
        self.restorer.poll()

    def busy(self) -> bool:
        """Whether :meth:`poll` has something to wait for."""
        return self.ladder.busy() or self.parking.waiting() or self.restorer.busy()

    def save_all(self) -> None:
        """Put everything that is parked where it outlasts the process, as far as there is such a place."""
        try:
            self.parking.write_all()
        except LevelError as error:
            log.warning("not everything that was parked is on disk: %s", error)

    def close(self) -> None:
        self.restorer.close()
        self.ladder.close()

    def _ask(self, kind: str, need: int, available: int | None) -> Verdict:
        return self._admit(placement(self.options, kind, need, available, bool(self.ladder.below)))

    # -- why ----------------------------------------------------------------------------------------------------

    def explain(self, query: Query, reused: int) -> tuple[int, str]:
        """How many tokens beyond the ``reused`` ones had been computed by a sequence that was since dropped, and why it
        was dropped."""
        known, reason = self._ghosts.longest(query)
        return (known - reused, reason) if known > reused else (0, "")

    def distrust(self, found: Found) -> None:
        """Drop a stored entry whose K/V made a step fail, wherever it still is."""
        if self.ladder.holds(found.level, found.entry):
            with self.ladder.tolerating(found.level):
                found.level.remove(found.entry)
            self._on_left(found.entry, found.level.name, "damaged")

    def forget(self, live: Live, reason: str) -> None:
        """Release a live conversation whose pages cannot be trusted any more, and remember why."""
        if len(live.tokens) and live.keep:
            self._on_left(live.entry(reason), "live", reason)
        live.release()

    def _on_left(self, entry: Entry, level: str, reason: str, moved_to: str | None = None) -> None:
        if moved_to is None:
            self._ghosts.add(Ghost(entry.identity, entry.tokens, entry.addresses, reason))
        else:
            log.info("demoted %d tokens %s -> %s", len(entry.tokens), level, moved_to)
        self._emit(
            ConversationEvicted(
                conversation=entry.conversation,
                tokens=len(entry.tokens),
                nbytes=self.restorer.nbytes(len(entry.tokens)),
                level=level,
                reason=reason,
                moved_to=moved_to,
            )
        )

    def _on_trouble(self, level: str, error: Exception) -> None:
        now = self.clock.monotonic()
        if now - self._warned.get(level, -60.0) >= 60.0:  # a level that is broken may fail in every step
            self._warned[level] = now
            self._emit(LevelWarning(level=level, message=str(error)))
            bug = None if isinstance(error, LevelError) else error
            log.warning("level %s: %s", level, error, exc_info=bug)
