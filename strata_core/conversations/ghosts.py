"""What was computed once and is gone: the memory behind the why-ledger.

When tokens have to be read that had been computed before, users want to know why. So the ids of sequences that were
dropped are remembered for a while, with the reason; the K/V are not.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs
import numpy as np

from strata_core.conversations.index import PrefixIndex, Query

#: Bounds of the memory. Ids take 4 bytes a token, addresses about 2 (49 bytes a page of 32), the sparse index little:
#: some 25 MiB when full.
MAX_GHOSTS = 512
MAX_GHOST_TOKENS = 4 << 20
#: Pages between two that a ghost is listed under.
STRIDE = 8


@attrs.frozen(eq=False)
class Ghost:
    """A dropped sequence; fields as in :class:`strata_core.store.base.Entry`."""

    identity: bytes
    tokens: np.ndarray
    addresses: tuple[bytes, ...]
    reason: str
    states: None = None  # how much was known counts, not where it could have been resumed


class Ghosts:
    """A bounded set of ghosts; the oldest are forgotten first."""

    def __init__(self, max_ghosts: int = MAX_GHOSTS, max_tokens: int = MAX_GHOST_TOKENS):
        self._max_ghosts = max_ghosts
        self._max_tokens = max_tokens
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._index: PrefixIndex[int] = PrefixIndex(STRIDE)
        self._tokens = 0
        self._next = 0

    def add(self, ghost: Ghost) -> None:
        if not len(ghost.tokens) or len(ghost.tokens) > self._max_tokens:
            return
        self._ghosts[self._next] = ghost
        self._index.add(self._next, ghost)
        self._tokens += len(ghost.tokens)
        self._next += 1
        while len(self._ghosts) > self._max_ghosts or self._tokens > self._max_tokens:
            key, oldest = self._ghosts.popitem(last=False)
            self._index.remove(key)
            self._tokens -= len(oldest.tokens)

    def longest(self, query: Query) -> tuple[int, str]:
        """How many leading tokens of a prompt had been computed by a sequence since dropped, and why it was dropped.

        Among equals the one dropped last speaks. (0, "") when none shares anything.
        """
        found = self._index.longest(query)
        if not found:
            return 0, ""
        most = found[0][1]
        return most, self._ghosts[max(key for key, shared in found if shared == most)].reason
