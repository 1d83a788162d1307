"""What samplers ask of a row of scores on the host, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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

    def masses(self, scores: np.ndarray, piece: int, best: float, temperature: float) -> NDArray[np.float64]:
        """Sums of ``exp((score - best) / temperature)`` of every ``piece`` scores, the last of which may be fewer:
        float64 ``(ceil(n / piece),)``, accurate to some units in the last place.

        :param best: no score is higher. :param temperature: above 0.
        """
        sums = np.empty(-(-len(scores) // piece))
        for i in range(len(sums)):  # so that what is float64 stays in the cache
            weights = scores[i * piece : (i + 1) * piece].astype(np.float64)
            weights -= best
            if temperature != 1:
                weights /= temperature
            sums[i] = np.exp(weights, out=weights).sum()
        return sums
