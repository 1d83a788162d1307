"""Tokens guessed ahead, so that one step can compute several: drafts of speculative decoding.

A draft is only a guess. The step that computes it also computes what the model says at every position of it, and a
drafted token counts when it is the one that is sampled there. So replies are the same with drafts and without.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs
import numpy as np

#: Ways of guessing: what followed the last tokens before, and the model's own layer for further tokens.
KINDS = ("lookup", "mtp")
#: Most tokens of a draft by its kind, where nothing is guessed.
NO_DRAFTS = MappingProxyType(dict.fromkeys(KINDS, 0))
#: Lengths of the tails that are looked for, the longest first. A single token says too little of what follows.
TAILS = (4, 3, 2)
#: Most replies' tokens that pass without a draft after drafts that were all wrong.
LONGEST_PAUSE = 16


def look_up(tokens: np.ndarray, count: int) -> np.ndarray:
    """What followed the last tokens when they stood in the text before: up to ``count`` ids, none if they never did
    (prompt lookup, Saxena 2023). Pure.

    :param tokens: int32 ids of the whole text.
    """
    n = len(tokens)
    ends = np.flatnonzero(tokens[: n - 1] == tokens[-1]) if n > 1 else np.empty(0, np.int64)
    for tail in TAILS:
        found = ends[ends >= tail - 1]
        for back in range(1, tail):
            found = found[tokens[found - back] == tokens[n - 1 - back]] if tail <= n else found[:0]
        if len(found):
            after = int(found[-1]) + 1
            return tokens[after : after + count]
    return tokens[:0]


@attrs.define
class Drafter:
    """How drafts of one kind fare in one reply.

    :ivar most: tokens of a draft, at most. :ivar drafted: :ivar accepted: tokens so far.
    """

    most: int
    drafted: int = 0
    accepted: int = 0
    _pause: int = 0  # tokens still to pass without a draft
    _next_pause: int = 1

    def propose(self, tokens: np.ndarray, room: int) -> np.ndarray:
        """What :func:`look_up` finds if a draft is due, maybe nothing.

        :param tokens: the whole text, the token that was sampled last at its end.
        :param room: most tokens there is use for.
        """
        count = min(self.most, room)
        return look_up(tokens, count) if self.due() and count > 0 else tokens[:0]

    def due(self) -> bool:
        """Whether it is time for a draft. Asked once per step of the reply."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how a draft fared. Where none of it was right, the next is put off, longer each time: rows that
        are computed for nothing cost time."""
        self.drafted += drafted
        self.accepted += accepted
        if accepted:
            self._next_pause = 1
        else:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
