"""Resuming where the ids differ but the text does not.

A reply was generated token by token; when a client sends it back, the tokenizer may cut the same text differently. The
stored sequence is then still a computed version of the prompt: where both spell the same bytes up to a common token
boundary, the prompt may continue from the stored ids.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Bytes of spelling looked at beyond the first difference. Replies re-tokenise differently within a word or two, then
#: agree again; a bound keeps the search linear for long histories that really differ.
MAX_BYTES = 1 << 20


def align(
    stored: np.ndarray, prompt: np.ndarray, start: int, spell: Callable[[int], bytes | None]
) -> tuple[int, int]:
    """The deepest pair ``(i, j)`` with ``stored[:i]`` and ``prompt[:j]`` spelling the same text.

    :param start: both agree in their first ``start`` ids; the search begins there.
    :param spell: bytes of an ordinary token, None for a control token, which matches only itself.
    :returns: ``(start, start)`` when nothing further lines up.
    """
    best = i = j = start
    best_j = start
    left, right = b"", b""  # spelled since the last common boundary, of which one side is a prefix of the other
    spelled = 0
    while spelled <= MAX_BYTES:
        if left == right:
            best, best_j = i, j
            left = right = b""
        if len(left) <= len(right):
            if i >= len(stored):
                break
            piece, ours = spell(int(stored[i])), True
        else:
            if j >= len(prompt):
                break
            piece, ours = spell(int(prompt[j])), False
        if piece is None:
            # A control token may only stand at a common boundary, opposite itself.
            if left or right or i >= len(stored) or j >= len(prompt) or stored[i] != prompt[j]:
                break
            i, j = i + 1, j + 1
            continue
        if ours:
            left, i = left + piece, i + 1
        else:
            right, j = right + piece, j + 1
        spelled += len(piece)
        n = min(len(left), len(right))
        if left[:n] != right[:n]:
            break
        left, right = left[n:], right[n:]
    return best, best_j
