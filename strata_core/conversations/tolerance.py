"""Asking levels that may fail: what they raise is reported, and goes no further.

Levels come from plugins. One that breaks down, even in ways that the contract does not foresee, costs what it could
have given; requests and other levels do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Store, Usage

#: Called with a level's name and the error it met.
Trouble = Callable[[str, Exception], None]


class Tolerance:
    """:param trouble: told of every fault."""

    def __init__(self, trouble: Trouble):
        self._trouble = trouble

    @contextmanager
    def tolerating(self, level: Store) -> Iterator[None]:
        """Whatever the level raises within is reported, and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            # Also what the contract does not allow: levels come from plugins, whose faults must not end requests.
            self._trouble(level.name, error)

    def entries(self, level: Level) -> Sequence[Entry]:
        """What a level lists; nothing where it fails."""
        with self.tolerating(level):
            return list(level.entries())
        return ()

    def usage(self, level: Store) -> Usage | None:
        """Fill and bounds of a level; None where it fails."""
        with self.tolerating(level):
            return level.usage()
        return None

    def holds(self, level: Level, entry: Entry) -> bool:
        """Whether a level lists an entry."""
        with self.tolerating(level):
            return level.holds(entry.id)
        return False

    def held(self, level: Level, entry: Entry) -> HeldPages | None:
        """The entry's pages, where they are in memory; the level goes on holding them."""
        with self.tolerating(level):
            return level.held(entry)
        return None

    def busy_level(self, level: Store) -> bool:
        """Whether a level has background work."""
        with self.tolerating(level):
            return level.busy()
        return False
