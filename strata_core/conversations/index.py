"""Finds the stored sequences that share the longest prefix with a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import numpy as np

from strata_core.conversations.tokens import common_prefix
from strata_core.pool.states import resumable

K = TypeVar("K", bound=Hashable)

#: How many entries are looked at for the sake of less than a page.
RECENT = 256


class Indexed(Protocol):
    """What the index needs of an entry."""

    @property
    def identity(self) -> bytes: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def addresses(self) -> Sequence[bytes]: ...
    @property
    def states(self) -> Sequence[int] | None: ...


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
    compared token by token, so a match never rests on an address alone. Entries with states are resumed at one of
    these, which may be far before the end of what they share: then entries listed higher up are looked at too.

    Where no complete page is shared, only the :data:`RECENT` entries added last are compared: less than a page is to be
    gained, and thousands may begin alike.

    :param stride: list entries under every so many pages only. A large collection takes less memory, and a few more
        entries are compared.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
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
        for address in entry.addresses[self._stride - 1 :: self._stride]:
            self._by_address.setdefault(address, set()).add(key)

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        for address in entry.addresses[self._stride - 1 :: self._stride]:
            keys = self._by_address[address]
            keys.discard(key)
            if not keys:
                del self._by_address[address]

    def longest(self, query: Query, excluded: Collection[K] = ()) -> list[tuple[K, int]]:
        """Entries that share most with the prompt, each with the number of tokens it shares (at least 1), up to its
        deepest state if it has states.

        They are ordered longest first, in no order among equals.

        :param excluded: entries to leave out.
        """
        listed = query.addresses[self._stride - 1 :: self._stride]
        seen: set[K] = set()
        found: list[tuple[K, int]] = []
        least = len(query.tokens) + 1  # tokens that one of those seen shares; those that are not share less
        for depth in range(self._depth(listed), -1, -1):
            keys = self._by_address.get(listed[depth - 1], ()) if depth else self._recent()
            for key in [key for key in keys if key not in excluded and key not in seen]:
                seen.add(key)
                shared = self._shared(key, query)
                if shared:
                    least = min(least, shared)
                    states = self._entries[key].states
                    # The last token of a prompt is always read.
                    usable = shared if states is None else resumable(states, min(shared, len(query.tokens) - 1))
                    found += [(key, usable)] if usable else []
            if found and max(usable for _, usable in found) >= least:
                break
        return sorted(found, key=lambda f: -f[1])

    def _recent(self) -> Iterator[K]:
        return itertools.islice(reversed(self._entries), RECENT)

    def holders(self, address: bytes) -> Iterator[K]:
        """Entries that contain the page with this address, where that is one of those they are listed under."""
        return iter(self._by_address.get(address, ()))

    def _depth(self, listed: Sequence[bytes]) -> int:
        low, high = 0, len(listed)
        while low < high:
            middle = (low + high + 1) // 2
            if listed[middle - 1] in self._by_address:
                low = middle
            else:
                high = middle - 1
        return low

    def _shared(self, key: K, query: Query) -> int:
        entry = self._entries[key]
        return common_prefix(entry.tokens, query.tokens) if entry.identity == query.identity else 0
