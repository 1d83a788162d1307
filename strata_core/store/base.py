"""The level contract: where conversations go when they leave their slot.

A level keeps *entries*: immutable copies of one sequence's pages with the token ids they were computed from. Levels
form a ladder by ``rank`` (RAM first). The coordinator (:mod:`strata_core.conversations.ladder`) puts entries in, offers
what a level must give up to the next one down, and restores from whichever holds the longest usable prefix.

What a level must keep to, and what the conformance suite checks:

* ``put`` keeps all of an entry or raises and keeps nothing; after it returns, ``find`` offers the entry.
* ``load`` verifies what it reads. It raises :class:`DamagedEntry` rather than hand out bytes it cannot vouch for, and
  never offers such an entry again.
* A level never evicts by itself. It says what an entry would cost and what it may hold; the coordinator removes.
* All calls come from the engine thread, except ``load`` of a level that allows it (``loads_aside``). A level with its
  own threads hides them, holds the pages it still reads from (``HeldPages.fork``) and gives them back in ``poll``,
  which also says what their work came to (:class:`Outcome`).
* An entry whose ``put`` or ``adopt`` is still under way is offered by ``find`` and can be loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

from strata_core.errors import CannotAdopt, LevelError
from strata_core.pool.states import resumable

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
    :ivar turns: positions of the tokens that open a turn, ascending: where a client may come back to.
    :ivar root: whether this is the beginning of conversations (a system prompt), kept for its own sake.
    :ivar prefix: leading tokens that other conversations share, where a client has said so. Not stored.
    :ivar states: of a model with recurrent state, ascending positions that a state is kept at, the end among them; None
        for other models, whose entries can be resumed anywhere.
    :ivar key: of a root: the ``--system-prompt-cache-key`` it was kept under; it serves under the same one only.
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
    turns: tuple[int, ...] = attrs.field(default=(), repr=False)
    root: bool = False
    key: str = ""
    states: tuple[int, ...] | None = attrs.field(default=None, repr=False)
    prefix: int = 0

    def resumable(self, tokens: int) -> int:
        """The deepest position at or before ``tokens`` that it can be resumed at; 0 for none."""
        return resumable(self.states, tokens)


@attrs.frozen
class Usage:
    """What a level holds, all parts counted, and may hold at most (None: no bound).

    Entries that are leaving (:meth:`Level.set_leaving`) weigh nothing: their room is promised to others.
    """

    bytes: int
    entries: int
    max_bytes: int | None
    max_entries: int | None


@attrs.frozen(eq=False)
class Outcome:
    """What background work of a level came to.

    :ivar kind: ``stored``: a ``put`` is complete and readable from the level's own medium. ``adopted``: the level has
        taken the entry over from the level above, which can let it go. ``failed``: the level could not, and lists the
        entry no more.
    :ivar nbytes: bytes written; :ivar parts: new segments written; :ivar seconds: how long the work took.
    :ivar pages: of a failed ``put``: the entry's pages, so that they can be kept elsewhere. Whoever takes the outcome
        releases them.
    """

    kind: Literal["stored", "adopted", "failed"]
    entry: Entry
    nbytes: int = 0
    parts: int = 0
    seconds: float = 0.0
    error: str = ""
    pages: HeldPages | None = None


class Store(ABC):
    """What levels and archives have in common. ``rank`` is its place in reports, and a level's on the ladder."""

    name: str
    rank: int
    #: Where it keeps files, for reports; None for one that keeps none.
    folder: Path | None = None

    @abstractmethod
    def usage(self) -> Usage:
        """Bytes and entries held now, and their bounds."""

    def flush(self) -> None:  # noqa: B027 - a store without a medium has nothing to flush
        """Return when everything that was given before would survive a power cut.

        :raises LevelError: it would not.
        """

    def busy(self) -> bool:
        """Whether background work is under way that ``poll`` will have to finish."""
        return False

    def poll(self) -> Sequence[Outcome]:
        """Called between steps: finish what background work has completed, and tell what it came to. Never blocks."""
        return ()

    def settle(self) -> None:  # noqa: B027
        """Wait until no background work needs pages of the engine's pools any more: the next ``poll`` gives them back.
        Called when these have run out."""

    def close(self) -> None:  # noqa: B027
        """Complete background work and free everything. It is not used afterwards."""


class Archive(Store):
    """Where copies go that a newer one of the same conversation made needless, instead of being deleted.

    It is for people, who look into it and bring a copy back by hand: it is never searched, no request is ever served
    from it, and it is no part of the cascade. It keeps to its own bounds. What it cannot take is lost as it would be
    without an archive; that is an :class:`Outcome` that failed, and no error of any request.
    """

    @abstractmethod
    def take(self, entry: Entry, why: str, source: Level) -> None:
        """Begin to keep a copy of what ``source`` holds and will be told to remove as soon as this returns. Does not
        wait: ``poll`` tells what it came to.

        :param why: ``superseded`` (the newer copy begins with it) or ``compacted`` (its client rewrote it).
        :raises LevelError: it cannot; nothing has begun.
        """

    @abstractmethod
    def forget(self, conversation: str, tenant: str | None) -> None:
        """Begin to delete all copies of a conversation, as somebody asked for it to be forgotten; with ``tenant``, only
        that tenant's."""

    def expire(self, now: float) -> None:
        """Begin to let go what has been here for too long. :param now: seconds since the epoch."""


class Level(Store):
    """One rung. See the module's docstring for the rules all levels keep to.

    :ivar when_full: whether the coordinator lets old entries leave to make room for a new one, or has it go elsewhere.
    """

    when_full: Literal["evict-oldest", "reject"] = "evict-oldest"
    #: Whether it holds system prompts only (:attr:`Entry.root`). It is then asked after all others, and nothing else
    #: moves there or from there.
    for_roots: bool = False
    #: Whether ``load`` may run on a thread of its own while the engine thread calls other methods, so that other slots
    #: go on meanwhile. It must then touch nothing but the sink and what it guards itself.
    loads_aside: bool = False

    @abstractmethod
    def entries(self) -> Collection[Entry]:
        """All entries, in no particular order."""

    @abstractmethod
    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        """Entries that share most with the prompt, longest first, each with how many tokens it shares (at least 1): of
        an entry with states, how many it shares up to the deepest of them.

        The token ids were compared, not only addresses. Need not list shorter ones than the longest.

        :param excluded: ids of entries to leave out; those that share most of all others are listed.
        """

    @abstractmethod
    def weigh(self, entries: Collection[Entry]) -> int:
        """Bytes that exactly these entries would hold together here, shared parts counted once. They need not be held
        now; what is, is weighed as it is held."""

    @abstractmethod
    def cost(self, entry: Entry) -> int:
        """Bytes that ``put`` of this entry would add to :attr:`Usage.bytes`: the weight of what it does not share."""

    @abstractmethod
    def put(self, entry: Entry, pages: HeldPages) -> Outcome | None:
        """Keep an entry whose K/V are in ``pages``. The caller made room and goes on holding ``pages`` as long as it
        likes; what the level needs longer, it forks.

        :returns: what it came to, where the work is complete; None where it goes on in the background, and ``poll``
            will tell.
        :raises LevelError: it could not; nothing is kept.
        """

    @abstractmethod
    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        """Fill ``sink`` with the pages of the entry's first ``tokens`` positions, and the states it asks for, verified.

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

    def holds(self, entry_id: str) -> bool:
        """Whether an entry is listed."""
        return any(entry.id == entry_id for entry in self.entries())

    def beginnings(self, entry: Entry) -> list[Entry]:
        """Entries, other than this one, whose tokens are a beginning of this one's or equal to them."""
        return [
            other
            for other in self.entries()
            if other.id != entry.id
            and other.identity == entry.identity
            and len(other.tokens) <= len(entry.tokens)
            and np.array_equal(other.tokens, entry.tokens[: len(other.tokens)])
        ]

    def adopt(self, entry: Entry, source: Level) -> None:
        """Begin to take an entry over from the level above, without passing through the engine's pools. It keeps its
        age. The outcome comes from ``poll``; until then both levels have it, and only then is the source's removed.

        :raises CannotAdopt: the two levels do not know how (the default): the coordinator then carries the entry over
            through fresh pages. :raises LevelError: this one refuses. Nothing has begun.
        """
        raise CannotAdopt(f"level {self.name} cannot take entries over from level {source.name}")

    def set_leaving(self, entry: Entry, leaving: bool) -> None:
        """An entry is on its way to another level (or stays after all): it is still offered and read, but its room is
        promised to others. Called only for levels whose entries ``adopt`` can take."""
        raise LevelError(f"entries of level {self.name} do not leave on their own")

    def expired(self, now: float) -> Sequence[Entry]:
        """Entries older than the level's settings allow, the longest unused first; the coordinator lets them leave.

        :param now: seconds since the epoch.
        """
        return ()

    def reclaim(self, nbytes: int) -> None:
        """Begin to free what no entry needs (what a crash left behind, what was damaged), ``nbytes`` of it if there is
        as much. It counts no more from now on. The coordinator asks before it lets entries go."""


@attrs.frozen
class LevelContext:
    """What a level factory is given.

    :ivar settings: the effective settings; a plugin reads its own through ``settings.plugin(...)``.
    :ivar identity: what the running engine's K/V are compatible with.
    :ivar page_bytes: bytes of one block of pages (all pools).
    :ivar ram_budget: bytes that parked conversations may hold in RAM, as planned from settings and memory.
    :ivar pools: the engine's own pools.
    :ivar host_pools: pools in host memory to keep copies in, or None where the engine's own are in host memory.
    :ivar state_pool: :ivar host_state_pool: the same for recurrent states; None for models without.
    """

    settings: Settings
    identity: Identity
    page_tokens: int
    page_bytes: int
    ram_budget: int
    pools: tuple[PagePool, ...]
    host_pools: tuple[PagePool, ...] | None
    state_pool: PagePool | None = None
    host_state_pool: PagePool | None = None


@attrs.frozen
class LevelFactory:
    """What ``strata_register_levels`` registers.

    :ivar rank: place on the ladder: RAM 0, warm disk 10, cold disk 20, shared store 30; system prompts 40, archive 50.
    :ivar create: makes the level (or the archive, of which there is one), or returns None when it is not configured.
    """

    name: str
    rank: int
    create: Callable[[LevelContext], Level | Archive | None] = attrs.field(repr=False)
