"""Token sequences without their tokens: what tells common prefixes apart in a trace, and nothing else.

A sequence is written as *names* of its complete pages and *prints* of its tokens. A name is a keyed, chained hash of
everything up to the page's end, so equal names mean equal beginnings. A print is one byte per token that follows from
the key and from all tokens up to it: two sequences have equal prints as far as they have equal tokens, and differ at
the first other token with probability 255/256. The key is drawn per trace and never written, so neither names nor
prints can be checked against a guessed text. Prints of a page are masked with bytes of a keyed hash of what precedes
it: those of a page that occurs with one continuation only are random bytes to who has not the key.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

import attrs
import numpy as np
from blake3 import blake3

NAME_BYTES = 8
#: How many pages are remembered as written before; a forgotten one is written again. About 20 MB.
MAX_KNOWN = 1 << 17

_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying by it loses nothing; 2**64 divided by the golden ratio


@attrs.frozen(eq=False)
class Sequence:
    """A sequence beyond the pages that were written before.

    :ivar parent: name of the last page written before; empty where there is none.
    :ivar known: tokens up to that page's end.
    :ivar names: of the complete pages after it, ``NAME_BYTES`` each.
    :ivar prints: uint8, one per token after ``known``.
    """

    parent: bytes
    known: int
    names: bytes
    prints: np.ndarray


class Fingerprints:
    """Makes names and prints under a key of its own.

    :param key: 32 bytes; None draws them.
    """

    def __init__(self, page_tokens: int, key: bytes | None = None, max_known: int = MAX_KNOWN):
        self._size = page_tokens
        self._key = key or secrets.token_bytes(32)
        self._max_known = max_known
        self._written: OrderedDict[bytes, None] = OrderedDict()

    def tenant(self, tenant: str) -> str:
        """A digest in place of a tenant's name; the empty one stays empty."""
        return blake3(b"tenant" + tenant.encode(), key=self._key).hexdigest(length=NAME_BYTES) if tenant else ""

    def take(self, tenant: str, tokens: np.ndarray) -> Sequence:
        """A sequence of token ids, and note its pages as written.

        :param tokens: one-dimensional, integer.
        """
        data = np.ascontiguousarray(tokens, "<i4")
        # Pages of two tenants must not be told to be equal: their conversations are never shared.
        chain = [blake3(b"start" + tenant.encode(), key=self._key).digest(length=16)]
        for page in range(len(data) // self._size):
            ids = data[page * self._size : (page + 1) * self._size]
            chain.append(blake3(chain[-1] + ids.tobytes(), key=self._key).digest(length=16))
        known = 0
        while known + 1 < len(chain) and chain[known + 1] in self._written:
            known += 1
        fresh = chain[known + 1 :]
        prints = self._prints(data[known * self._size :], chain[known:])
        self._note(chain[1:])
        return Sequence(
            chain[known][:NAME_BYTES] if known else b"",
            known * self._size,
            b"".join(link[:NAME_BYTES] for link in fresh),
            prints,
        )

    def _note(self, links: list[bytes]) -> None:
        # Beginnings last: what many sequences share is then forgotten last.
        for link in reversed(links):
            self._written[link] = None
            self._written.move_to_end(link)
        while len(self._written) > self._max_known:
            self._written.popitem(last=False)

    def _prints(self, ids: np.ndarray, before: list[bytes]) -> np.ndarray:
        """One byte per id.

        :param before: what precedes each page that begins among ``ids``, its chained hash.
        """
        size = self._size
        pages = -(-len(ids) // size)
        padded = np.zeros((pages, size), np.uint64)
        padded.reshape(-1)[: len(ids)] = ids
        seeds = b"".join(blake3(b"prints" + link, key=self._key).digest(length=8 + size) for link in before[:pages])
        seeded = np.frombuffer(seeds, np.uint8).reshape(pages, 8 + size)
        state = np.ascontiguousarray(seeded[:, :8]).view("<u8").reshape(pages).astype(np.uint64)
        prints = np.empty((pages, size), np.uint8)
        for position in range(size):
            state = (state ^ padded[:, position]) * _MIX
            state ^= state >> np.uint64(32)
            prints[:, position] = state >> np.uint64(56)
        return (prints ^ seeded[:, 8:]).reshape(-1)[: len(ids)]
