"""Finds the stored sequences that share the longest prefix with a prompt."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import numpy as np

from strata_core.conversations.tokens import common_prefix

K = TypeVar("K", bound=Hashable)


class Indexed(Protocol):
    """What the index needs of an entry."""

    @property
    def identity(self) -> bytes: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def addresses(self) -> Sequence[bytes]: ...


@attrs.frozen(eq=False)
class Query:
    """A prompt to look up: its token ids, and the addresses of its complete pages under ``identity`` (a digest)."""

    identity: bytes
    tokens: np.ndarray
    addresses: tuple[bytes, ...]


class PrefixIndex(Generic[K]):
    """Entries by every prefix of complete pages.

    Since an entry is listed under each of its page addresses, the prompt's addresses that have entries are a prefix of
    all its addresses, and the deepest is found by bisection. Only entries listed there can share most; they are then
    compared token by token, so a match never rests on an address alone.
    """

    def __init__(self) -> None:
        self._entries: dict[K, Indexed] = {}
        self._by_address: dict[bytes, set[K]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def add(self, key: K, entry: Indexed) -> None:
        """List an entry; its tokens and addresses must not change while it is listed."""
        if key in self._entries:
            self.remove(key)
        self._entries[key] = entry
        for address in (entry.identity, *entry.addresses):
            self._by_address.setdefault(address, set()).add(key)

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        for address in (entry.identity, *entry.addresses):
            keys = self._by_address[address]
            keys.discard(key)
            if not keys:
                del self._by_address[address]

    def longest(self, query: Query, excluded: Collection[K] = ()) -> list[tuple[K, int]]:
        """Entries that share most with the prompt, each with the number of tokens it shares (at least 1).

        All of them lie within one page of the longest; they are ordered longest first, in no order among equals.

        :param excluded: entries to leave out.
        """
        for depth in range(self._depth(query), -1, -1):
            keys = self._by_address.get(query.addresses[depth - 1] if depth else query.identity, ())
            shared = ((key, self._shared(key, query)) for key in keys if key not in excluded)
            found = sorted(((key, n) for key, n in shared if n > 0), key=lambda f: -f[1])
            if found:
                return found
        return []

    def holders(self, address: bytes) -> Iterator[K]:
        """Entries that contain the page with this address."""
        return iter(self._by_address.get(address, ()))

    def _depth(self, query: Query) -> int:
        low, high = 0, len(query.addresses)
        while low < high:
            middle = (low + high + 1) // 2
            if query.addresses[middle - 1] in self._by_address:
                low = middle
            else:
                high = middle - 1
        return low

    def _shared(self, key: K, query: Query) -> int:
        entry = self._entries[key]
        return common_prefix(entry.tokens, query.tokens) if entry.identity == query.identity else 0
