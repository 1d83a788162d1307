"""A conversation in a slot: the ids that were computed, and the pages that hold their K/V."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import attrs
import numpy as np

from strata_core.conversations.checkpoints import CheckpointRules, checkpoints, root_position
from strata_core.conversations.identity import Identity, extend_addresses
from strata_core.conversations.tokens import TokenList
from strata_core.pool.pool import PagePool
from strata_core.pool.states import StateTrack
from strata_core.pool.table import HeldPages, PageTable
from strata_core.store.base import Entry


@attrs.define(eq=False)
class Live:
    """What a slot holds. ``tokens`` never runs ahead of the K/V: ids are appended after the step that computed them.

    :ivar states: the recurrent states of its sequence, where the model has any; :ivar rules: which of them are kept.
    :ivar keep: whether it may be kept when it leaves the slot, and found by other requests.
    :ivar prefix: tokens that other conversations share, where a client has said so; else 0.
    :ivar prompt: tokens of the prompt it was last given: what "the same prompt again" is told by.
    :ivar hidden: float32 hidden row of its last position, which a model's guesses go on from
        (:class:`strata_core.models.base.DraftLayer`); None where it is not known.
    """

    identity: Identity
    tenant: str
    page_tokens: int
    table: PageTable
    states: StateTrack | None = None
    rules: CheckpointRules = attrs.field(factory=CheckpointRules)
    conversation: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    tokens: TokenList = attrs.field(factory=TokenList)
    created: float = attrs.field(factory=time.time)
    used: float = attrs.field(factory=time.time)
    pinned: bool = False
    keep: bool = True
    prompt: int = 0
    prefix: int = 0
    openers: frozenset[int] = frozenset()
    hidden: np.ndarray | None = None
    _addresses: tuple[bytes, ...] = ()
    _stops: frozenset[int] = frozenset()  # positions at which the state is kept when it is left

    @classmethod
    def begin(
        cls,
        identity: Identity,
        tenant: str,
        pools: Sequence[PagePool],
        openers: frozenset[int] = frozenset(),
        state_pool: PagePool | None = None,
        rules: CheckpointRules | None = None,
    ) -> Live:
        """An empty conversation.

        :param openers: ids of the tokens that open a turn.
        :param state_pool: of a model with recurrent state; :param rules: which states are kept.
        """
        size, rules = pools[0].layout.page_tokens, rules or CheckpointRules()
        states = None if state_pool is None else StateTrack(state_pool, rules.most)
        return cls(
            identity.for_tenant(tenant), tenant, size, PageTable(pools), states=states, rules=rules, openers=openers
        )

    def turns(self) -> tuple[int, ...]:
        """Positions of the tokens that open a turn."""
        return self._openers_in(self.tokens.view())

    def _openers_in(self, tokens: np.ndarray) -> tuple[int, ...]:
        if not self.openers:
            return ()
        return tuple(np.flatnonzero(np.isin(tokens, list(self.openers))).tolist())

    @property
    def positions(self) -> tuple[int, ...] | None:
        """Where it can be resumed; None for anywhere."""
        return None if self.states is None else self.states.positions

    def plan(self, prompt: np.ndarray, prefix: int = 0) -> None:
        """It is about to read the rest of ``prompt``, whose first ``prefix`` tokens others share. Settles where to stop
        for states."""
        self.prefix = prefix or self.prefix
        if self.states is None:
            return
        turns, start = self._openers_in(prompt), len(self.tokens)
        # A stored copy may end where this begins: it is replaced only by one that can be resumed there too.
        stops = checkpoints(turns, start, len(prompt), self.page_tokens, self.rules, self.prefix)
        self._stops = frozenset((start, *stops))
        root = root_position(turns, self.page_tokens, self.rules.root, self.prefix)
        if root is not None and self.rules.most:
            self.states.protect(root)

    def until_stop(self, rows: int) -> int:
        """How many of the next ``rows`` tokens can be computed in one step."""
        start = len(self.tokens)
        return min((stop - start for stop in self._stops if start < stop < start + rows), default=rows)

    def extend(self, tokens: np.ndarray, hidden: np.ndarray | None = None) -> None:
        """A step has computed these tokens, and these hidden rows of them."""
        former = len(self.tokens)
        self.hidden = hidden[-1].copy() if hidden is not None and len(hidden) else None
        self.tokens.extend(tokens)
        if self.states is not None:
            self.states.advance(len(self.tokens), keep=former in self._stops)

    def accept(self, tokens: np.ndarray, count: int, hidden: np.ndarray | None = None) -> int:
        """A step has computed these tokens, of which the first ``count`` are right and the others were guessed wrong;
        ``hidden`` are the hidden rows of all.

        :returns: how many of the right ones have to be computed once more: all, where a recurrent state has gone past
            them. The others leave no trace.
        """
        exact = self.states is None or count == len(tokens)
        if exact:
            self.extend(tokens[:count], None if hidden is None else hidden[:count])
        self.table.truncate(len(self.tokens))
        return 0 if exact else count

    def adopt(self, pages: HeldPages, tokens: np.ndarray) -> None:
        """Begin with pages that hold the K/V of ``tokens``; the caller releases its own handle."""
        self.table.adopt(pages)
        self.tokens.extend(tokens)
        if self.states is not None and pages.states is not None:
            self.states.adopt(pages.states, len(tokens))

    def hold(self, tokens: int) -> HeldPages:
        """A handle on the pages, and states, of the first ``tokens`` positions."""
        return self.table.hold(tokens, None if self.states is None else self.states.hold(tokens))

    def addresses(self) -> tuple[bytes, ...]:
        """Addresses of its complete pages."""
        self._addresses = extend_addresses(self.identity, self._addresses, self.tokens.view(), self.page_tokens)
        return self._addresses

    def entry(self, reason: str) -> Entry:
        """What a level is told of this conversation as it is now."""
        return Entry(
            id=uuid.uuid4().hex,
            conversation=self.conversation,
            identity=self.identity.digest,
            tokens=self.tokens.frozen(),
            addresses=self.addresses(),
            created=self.created,
            used=self.used,
            reason=reason,
            tenant=self.tenant,
            pinned=self.pinned,
            turns=self.turns(),
            states=self.positions,
            prefix=self.prefix if self.prefix <= len(self.tokens) else 0,
        )

    def stop(self) -> None:
        """Computing has ended early. What was really computed stays: up to the last complete page, or, of a model with
        recurrent state, all of it, as there is a state at its end."""
        if self.states is None:
            self.truncate(len(self.tokens) - len(self.tokens) % self.page_tokens)

    def truncate(self, tokens: int) -> None:
        """Give up everything behind the first ``tokens`` positions, where it must be possible to resume."""
        if tokens < len(self.tokens):
            self.hidden = None
        self.tokens.truncate(tokens)
        self._addresses = self._addresses[: tokens // self.page_tokens]
        self.table.truncate(tokens)
        if self.states is not None:
            self.states.truncate(tokens)

    def release(self) -> None:
        """Give all pages back. The conversation is not used afterwards."""
        self.table.truncate(0)
        if self.states is not None:
            self.states.truncate(0)
