"""A conversation in a slot: the ids that were computed, and the pages that hold their K/V."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import attrs
import numpy as np

from strata_core.conversations.identity import Identity, extend_addresses
from strata_core.conversations.tokens import TokenList
from strata_core.pool.pool import PagePool
from strata_core.pool.table import HeldPages, PageTable
from strata_core.store.base import Entry


@attrs.define(eq=False)
class Live:
    """What a slot holds. ``tokens`` never runs ahead of the K/V: ids are appended after the step that computed them.

    :ivar keep: whether it may be kept when it leaves the slot, and found by other requests.
    :ivar prompt: tokens of the prompt it was last given: what "the same prompt again" is told by.
    """

    identity: Identity
    tenant: str
    page_tokens: int
    table: PageTable
    conversation: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    tokens: TokenList = attrs.field(factory=TokenList)
    created: float = attrs.field(factory=time.time)
    used: float = attrs.field(factory=time.time)
    pinned: bool = False
    keep: bool = True
    prompt: int = 0
    openers: frozenset[int] = frozenset()
    _addresses: tuple[bytes, ...] = ()

    @classmethod
    def begin(
        cls, identity: Identity, tenant: str, pools: Sequence[PagePool], openers: frozenset[int] = frozenset()
    ) -> Live:
        """An empty conversation. ``openers``: ids of the tokens that open a turn."""
        size = pools[0].layout.page_tokens
        return cls(identity.for_tenant(tenant), tenant, size, PageTable(pools), openers=openers)

    def turns(self) -> tuple[int, ...]:
        """Positions of the tokens that open a turn."""
        if not self.openers:
            return ()
        return tuple(np.flatnonzero(np.isin(self.tokens.view(), list(self.openers))).tolist())

    def adopt(self, pages: HeldPages, tokens: np.ndarray) -> None:
        """Begin with pages that hold the K/V of ``tokens``; the caller releases its own handle."""
        self.table.adopt(pages)
        self.tokens.extend(tokens)

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
        )

    def truncate(self, tokens: int) -> None:
        """Give up everything behind the first ``tokens`` positions."""
        self.tokens.truncate(tokens)
        self._addresses = self._addresses[: tokens // self.page_tokens]
        self.table.truncate(tokens)

    def release(self) -> None:
        """Give all pages back. The conversation is not used afterwards."""
        self.table.truncate(0)
