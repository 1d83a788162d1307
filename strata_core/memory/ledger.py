"""Who holds how many bytes of memory: one set of accounts for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import attrs

from strata_core.errors import OutOfMemory


@attrs.frozen
class Account:
    """State of one account, in bytes.

    :ivar held: reserved now; :ivar peak: the most that was ever reserved; :ivar limit: None for no limit.
    """

    held: int = 0
    peak: int = 0
    limit: int | None = None


class MemoryLedger:
    """Named accounts (weights, pool, parked, staging, queue ...) with optional hard limits.

    An owner reserves *before* it allocates and releases *after* it freed, so that the sum of the accounts is never
    less than what is really held. The ledger allocates nothing itself. Thread-safe.

    :param limits: the most bytes that an account may hold.
    """

    def __init__(self, limits: Mapping[str, int] | None = None):
        self._lock = threading.Lock()
        self._accounts = {name: Account(limit=limit) for name, limit in (limits or {}).items()}

    def reserve(self, account: str, nbytes: int) -> None:
        """Add ``nbytes`` to an account, which is opened if it is new.

        :raises OutOfMemory: the account's limit does not allow it; nothing changed.
        """
        _check(nbytes)
        with self._lock:
            found = self._accounts.get(account, Account())
            held = found.held + nbytes
            if found.limit is not None and held > found.limit:
                raise OutOfMemory(
                    f"{account}: {nbytes} more bytes do not fit: {found.held} of {found.limit} are held", param=account
                )
            self._accounts[account] = attrs.evolve(found, held=held, peak=max(found.peak, held))

    def release(self, account: str, nbytes: int) -> None:
        """Take ``nbytes`` off an account.

        :raises ValueError: more than the account holds: the caller's bookkeeping is wrong.
        """
        _check(nbytes)
        with self._lock:
            found = self._accounts.get(account, Account())
            if nbytes > found.held:
                raise ValueError(f"{account}: {nbytes} bytes released, but only {found.held} are held")
            self._accounts[account] = attrs.evolve(found, held=found.held - nbytes)

    def snapshot(self) -> dict[str, Account]:
        """All accounts at one moment."""
        with self._lock:
            return dict(self._accounts)

    def held(self) -> int:
        """Bytes held by all accounts at one moment."""
        return sum(account.held for account in self.snapshot().values())


def _check(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes: a negative amount cannot be reserved or released")
