"""Finds, restores and parks conversations, and keeps the ledger of why tokens are read again.

The engine asks it four things: which computed sequence a prompt can resume from (:meth:`Keeper.find`), the pages to
resume with (:meth:`Keeper.restore`, :meth:`Keeper.release`), to put away what leaves a slot (:meth:`Keeper.park`), and
why tokens had to be read that had been computed before (:meth:`Keeper.explain`). It knows nothing of requests or HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from strata_core.conversations.ghosts import Ghost, Ghosts
from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import Query
from strata_core.conversations.ladder import Found, Ladder
from strata_core.conversations.live import Live
from strata_core.conversations.matching import Candidate, MatchRules, best_live, choose
from strata_core.conversations.placement import Action, Placement, Verdict
from strata_core.errors import DamagedEntry, LevelError, OutOfMemory
from strata_core.events import ConversationEvicted, ConversationParked, ConversationRestored, Event, LevelWarning
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level

log = logging.getLogger("strata.cache")


@attrs.frozen
class KeeperOptions:
    """Settings of parking, in bytes; see SPEC of the same flags.

    :ivar enabled: ``--no-conversation-cache`` turns all reuse off, that of live conversations too.
    """

    enabled: bool = True
    parking_floor: int = 2560 << 20
    transient_floor: int = 512 << 20
    rules: MatchRules = attrs.field(factory=MatchRules)


class Keeper:
    """See the module's docstring.

    :param copies: whether parking to RAM copies pages, because the engine's own are on a device.
    :param spell: bytes of an ordinary token, None for a control token.
    :param available: bytes of memory available now; None where unknown.
    :param admit: the admission rules.
    :param emit: takes events for observers.
    """

    def __init__(
        self,
        identity: Identity,
        pools: Sequence[PagePool],
        levels: Sequence[Level],
        options: KeeperOptions,
        *,
        copies: bool,
        max_context: int,
        spell: Callable[[int], bytes | None],
        available: Callable[[], int | None],
        admit: Callable[[Placement], Verdict],
        emit: Callable[[Event], None],
    ):
        self.identity = identity
        self.pools = tuple(pools)
        self.options = options
        self.ladder = Ladder(levels, self._on_left, self._on_trouble)
        self.discards = 0
        self.restore_failures = 0
        self._copies = copies
        self._max_context = max_context
        self._spell = spell
        self._available = available
        self._admit = admit
        self._emit = emit
        self._ghosts = Ghosts()
        self._warned: dict[str, float] = {}

    # -- looking up ---------------------------------------------------------------------------------------------

    def query(self, tenant: str, tokens: np.ndarray) -> Query:
        """A prompt as levels look it up, under the identity of its tenant."""
        identity = self.identity.for_tenant(tenant)
        page_tokens = self.pools[0].layout.page_tokens
        return Query(identity.digest, tokens, page_addresses(identity, tokens, page_tokens))

    def find(
        self, query: Query, lives: Sequence[tuple[Live, bool]], excluded: frozenset[str] = frozenset()
    ) -> Candidate | None:
        """What a prompt resumes from, or None. A stored entry it names is guarded until :meth:`release`.

        :param lives: what the slots hold, and whether each is busy.
        :param excluded: ids of entries whose restore failed for this prompt.
        """
        if not self.options.enabled:
            return None
        live = best_live(lives, query.identity, query.tokens)
        found = self.ladder.find(query, excluded)
        candidate = choose(live, found, query.tokens, self.options.rules, self._spell, self._max_context)
        if candidate is not None and candidate.found is not None:
            self.ladder.guard(candidate.found.entry)
        return candidate

    def release(self, candidate: Candidate) -> None:
        """End the protection that :meth:`find` gave."""
        if candidate.found is not None:
            self.ladder.unguard(candidate.found.entry)

    def restore(self, candidate: Candidate) -> HeldPages | None:
        """Pages with the K/V of the candidate's first ``shared`` tokens, held for the caller; None when that failed.

        Pages that are in the engine's pools already are only held once more. Others are filled first and handed out
        when all of them are there and verified, so a failure changes nothing.
        """
        start = time.perf_counter()
        if candidate.live is not None:
            pages = candidate.live.table.hold(candidate.shared)
            conversation = candidate.live.conversation
        else:
            assert candidate.found is not None
            conversation = candidate.found.entry.conversation
            try:
                pages = self._fetch(candidate.found, candidate.shared)
            except (LevelError, OutOfMemory) as error:
                self._refused(candidate.found, error)
                return None
        elapsed = time.perf_counter() - start
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
        return pages

    def take(self, candidate: Candidate) -> None:
        """The whole of a stored entry is live again in memory: its parked copy, which only refers to the same pages,
        goes. Copies on other media stay."""
        if candidate.found is None or candidate.shared < len(candidate.found.entry.tokens):
            return
        if candidate.found.level.rank == 0:
            candidate.found.level.remove(candidate.found.entry)

    def _fetch(self, found: Found, tokens: int) -> HeldPages:
        held = found.level.held(found.entry)
        if held is not None and held.pools == self.pools:
            return held.fork(tokens)
        need = self.pools[0].layout.pages_for(tokens) * self._block_bytes()
        verdict = self._ask("restore", need, self._available())
        if verdict.action is Action.REFUSE:
            raise LevelError(f"memory admission; {verdict.reason}")
        if verdict.action is Action.THROUGH:
            log.info(
                "%s hit under the transient RAM floor (need %d MiB plus %d MiB, not %d MiB)",
                found.level.name, need >> 20, self.options.transient_floor >> 20, self.options.parking_floor >> 20,
            )
        sink = self._sink(tokens)
        try:
            found.level.load(found.entry, tokens, sink)
        except LevelError:
            sink.discard()
            raise
        except Exception as error:
            # Not what the contract allows. A fault of a level must not end the request.
            log.exception("level %s failed", found.level.name)
            sink.discard()
            raise LevelError(f"{type(error).__name__}: {error}") from error
        return sink.finish()

    def _sink(self, tokens: int) -> PageSink:
        while True:
            try:
                return PageSink(self.pools, tokens)
            except OutOfMemory:
                if not self.reclaim():
                    raise

    def reclaim(self) -> bool:
        """Get back pages of the engine's pools that conversations hold beside the slots. False when none can be.

        First those that background work still reads; then those of the oldest conversation in RAM, where these are in
        the same pools.
        """
        return self.ladder.settle() or (not self._copies and self.ladder.shed())

    def _refused(self, found: Found, error: Exception) -> None:
        self.restore_failures += 1
        log.info("ladder: rung %s refused (%s)", found.level.name, error)
        if isinstance(error, DamagedEntry):
            # The level has put it out of reach; what it knew is gone.
            self._on_left(found.entry, found.level.name, "damaged")

    # -- putting away -------------------------------------------------------------------------------------------

    def park(self, live: Live, reason: str) -> None:
        """Put away what leaves a slot, then release it. What nothing takes is a counted discard."""
        start = time.perf_counter()
        tokens = len(live.tokens)
        if not tokens or not live.keep or not self.options.enabled:
            live.release()
            return
        entry = live.entry(reason)
        pages = live.table.hold(tokens)
        level, verdict = self._place(entry, pages)
        pages.release()
        live.release()
        if level is None:
            self.discards += 1
            why = "admission" if verdict.action is Action.REFUSE else "no level has room"
            self._on_left(entry, "live", f"discarded: {why}")
            self._log_parked(entry, start, None)
            return
        dropped = self.ladder.supersede(entry, level)
        if dropped:
            log.info("dropped %d superseded", dropped)
        self._log_parked(entry, start, level)

    def _place(self, entry: Entry, pages: HeldPages) -> tuple[Level | None, Verdict]:
        levels = self.ladder.levels
        in_ram = bool(levels) and levels[0].rank == 0
        need = levels[0].cost(entry) if in_ram and self._copies else 0
        evicted = 0
        while True:
            available = self._available()
            verdict = self._ask("park", need, available)
            # Under pressure the conversation that was just used is worth more than those parked before it.
            if verdict.action is not Action.REFUSE or available is None or not self.ladder.shed():
                break
            evicted += 1
        if verdict.action is Action.REFUSE:
            log.info(
                "skip parking (physical RAM admission; %s; evicted %d, %d still parked)",
                verdict.reason, evicted, len(levels[0].entries()) if in_ram else 0,
            )
            return None, verdict
        first = 1 if in_ram and verdict.action is Action.THROUGH else 0
        return self.ladder.put(entry, pages, first), verdict

    def _ask(self, kind: str, need: int, available: int | None) -> Verdict:
        return self._admit(
            Placement(
                kind=kind,
                need=need,
                available=available,
                parking_floor=self.options.parking_floor,
                transient_floor=self.options.transient_floor,
                lower=any(level.rank > 0 for level in self.ladder.levels),
            )
        )

    def _log_parked(self, entry: Entry, start: float, level: Level | None) -> None:
        elapsed = time.perf_counter() - start
        usage = self.ladder.levels[0].usage() if self.ladder.levels else None
        target = "discarded" if level is None else "ram" if level.rank == 0 else "disk"
        log.info(
            "parked %d tokens in %.1f ms (%s); parked=%d bytes=%d evictions=%d discards=%d",
            len(entry.tokens), 1e3 * elapsed, target, usage.entries if usage else 0, usage.bytes if usage else 0,
            self.ladder.counts["evictions"], self.discards,
        )
        if level is not None:
            nbytes = level.weigh([entry])
            self._emit(
                ConversationParked(
                    conversation=entry.conversation,
                    tokens=len(entry.tokens),
                    nbytes=nbytes,
                    target=level.name,
                    seconds=elapsed,
                )
            )

    # -- why ----------------------------------------------------------------------------------------------------

    def explain(self, query: Query, reused: int) -> tuple[int, str]:
        """How many tokens beyond the ``reused`` ones had been computed by a sequence that was since dropped, and why it
        was dropped."""
        known, reason = self._ghosts.longest(query)
        return (known - reused, reason) if known > reused else (0, "")

    def distrust(self, found: Found) -> None:
        """Drop a stored entry whose K/V made a step fail, wherever it still is."""
        if any(entry.id == found.entry.id for entry in found.level.entries()):
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
                nbytes=self.pools[0].layout.pages_for(len(entry.tokens)) * self._block_bytes(),
                level=level,
                reason=reason,
                moved_to=moved_to,
            )
        )

    def _on_trouble(self, level: str, error: Exception) -> None:
        self._emit(LevelWarning(level=level, message=str(error)))
        now = time.monotonic()
        if now - self._warned.get(level, -60.0) >= 60.0:
            self._warned[level] = now
            log.warning("level %s: %s", level, error)

    def _block_bytes(self) -> int:
        return sum(pool.layout.nbytes for pool in self.pools)
