"""The level contract: where conversations go when they leave their slot.

A level keeps *entries*: immutable copies of one sequence's pages with the token ids they were computed from. Levels
form a ladder by ``rank`` (RAM first). The coordinator (:mod:`strata_core.conversations.ladder`) puts entries in, offers
what a level must give up to the next one down, and restores from whichever holds the longest usable prefix.

What a level must keep to, and what the conformance suite checks:

* ``put`` keeps all of an entry or raises and keeps nothing; after it returns, ``find`` offers the entry.
* ``load`` verifies what it reads. It raises :class:`DamagedEntry` rather than hand out bytes it cannot vouch for, and
  never offers such an entry again.
* A level never evicts by itself. It says what an entry would cost and what it may hold; the coordinator removes.
* All calls come from the engine thread. A level with its own threads hides them, holds the pages it still reads from
  (``HeldPages.fork``) and gives them back in ``poll``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from strata_core.conversations.identity import Identity
    from strata_core.conversations.index import Query
    from strata_core.pool.pool import PagePool
    from strata_core.pool.sink import PageSink
    from strata_core.pool.table import HeldPages
    from strata_core.settings.core import Settings


@attrs.frozen(eq=False)
class Entry:
    """One stored copy of a conversation, without its bytes.

    :ivar id: of this copy; :ivar conversation: of the conversation, the same for all its copies.
    :ivar identity: digest that K/V compatibility hangs on, the tenant's salt included.
    :ivar tokens: int32 ids whose K/V the entry holds, read-only.
    :ivar addresses: of its complete pages.
    :ivar created: :ivar used: seconds since the epoch; ``used`` orders eviction.
    :ivar reason: why it left its slot (``switch``, ``rewind``, ``shutdown`` ...).
    :ivar pinned: never a victim of budget or age.
    """

    id: str
    conversation: str
    identity: bytes
    tokens: np.ndarray = attrs.field(repr=False)
    addresses: tuple[bytes, ...] = attrs.field(repr=False)
    created: float
    used: float
    reason: str
    tenant: str = ""
    pinned: bool = False


@attrs.frozen
class Usage:
    """What a level holds, all parts counted, and may hold at most (None: no bound)."""

    bytes: int
    entries: int
    max_bytes: int | None
    max_entries: int | None


class Level(ABC):
    """One rung. See the module's docstring for the rules all levels keep to."""

    name: str
    rank: int

    @abstractmethod
    def entries(self) -> Collection[Entry]:
        """All entries, in no particular order."""

    @abstractmethod
    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        """Entries that share most with the prompt, longest first, each with how many tokens it shares (at least 1).

        The token ids were compared, not only addresses. Need not list shorter ones than the longest.

        :param excluded: ids of entries to leave out; those that share most of all others are listed.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Bytes and entries held now, and their bounds."""

    @abstractmethod
    def weigh(self, entries: Collection[Entry]) -> int:
        """Bytes that exactly these entries would hold together here, shared parts counted once. They need not be held
        now; what is, is weighed as it is held."""

    @abstractmethod
    def cost(self, entry: Entry) -> int:
        """Bytes that ``put`` of this entry would add to :attr:`Usage.bytes`: the weight of what it does not share."""

    @abstractmethod
    def put(self, entry: Entry, pages: HeldPages) -> None:
        """Keep an entry whose K/V are in ``pages``. The caller made room and goes on holding ``pages`` as long as it
        likes; what the level needs longer, it forks.

        :raises LevelError: it could not; nothing is kept.
        """

    @abstractmethod
    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        """Fill ``sink`` with the pages of the entry's first ``tokens`` positions, verified.

        :raises DamagedEntry: the stored bytes are not what was put.
        :raises LevelError: they cannot be read now.
        """

    def held(self, entry: Entry) -> HeldPages | None:
        """The entry's pages where they are in memory: what a demotion is made from, and, where they are in the engine's
        own pools, what a restore refers to instead of copying.

        The level goes on holding them. None (the default) for a level that must be read.
        """
        return None

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Forget an entry and free what only it used."""

    @abstractmethod
    def update(self, entry: Entry) -> None:
        """Take over ``used`` and ``pinned`` of an entry with the same id."""

    def busy(self) -> bool:
        """Whether background work is under way that ``poll`` will have to finish."""
        return False

    def poll(self) -> None:  # noqa: B027 - a level without background work has nothing to finish
        """Called between steps: finish what background work has completed. Never blocks."""

    def settle(self) -> None:  # noqa: B027
        """Wait until no background work holds pages of the engine's pools. Called when these have run out."""

    def close(self) -> None:  # noqa: B027
        """Complete background work and free everything. The level is not used afterwards."""


@attrs.frozen
class LevelContext:
    """What a level factory is given.

    :ivar settings: the effective settings; a plugin reads its own through ``settings.plugin(...)``.
    :ivar identity: what the running engine's K/V are compatible with.
    :ivar page_bytes: bytes of one block of pages (all pools).
    :ivar ram_budget: bytes that parked conversations may hold in RAM, as planned from settings and memory.
    :ivar pools: the engine's own pools.
    :ivar host_pools: pools in host memory to keep copies in, or None where the engine's own are in host memory.
    """

    settings: Settings
    identity: Identity
    page_tokens: int
    page_bytes: int
    ram_budget: int
    pools: tuple[PagePool, ...]
    host_pools: tuple[PagePool, ...] | None


@attrs.frozen
class LevelFactory:
    """What ``strata_register_levels`` registers.

    :ivar rank: place on the ladder: RAM 0, warm disk 10, cold disk 20, shared store 30.
    :ivar create: makes the level, or returns None when it is not configured.
    """

    name: str
    rank: int
    create: Callable[[LevelContext], Level | None] = attrs.field(repr=False)
