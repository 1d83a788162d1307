"""What samplers ask of a row of scores on the host, in numpy."""

from __future__ import annotations

import numpy as np


class Scoring:
    """Part of the compute contract: a backend inherits these, and overrides what it does faster.

    Scores are float32 ``(n,)`` on the host, without NaN; ``-inf`` is a score like any other.
    """

    def top(self, scores: np.ndarray, k: int) -> np.ndarray:
        """Ids of the ``k`` highest scores, best first and the lower id first among equals: int64 ``(k,)``.

        :param k: 1 to ``n``.
        """
        if k < len(scores):
            threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
            candidates = np.flatnonzero(scores >= threshold)
        else:
            candidates = np.arange(len(scores))
        order = np.argsort(-scores[candidates], kind="stable")
        return np.asarray(candidates[order[:k]], np.int64)
