"""The highest of many scores, in numpy: what :meth:`Backend.top` does where a backend has nothing faster."""

from __future__ import annotations

import numpy as np


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` highest scores, best first and the lower id first among equals.

    :param scores: float32 ``(n,)`` without NaN; ``-inf`` is a score like any other.
    :param k: 1 to ``n``.
    :returns: int64 ``(k,)``.
    """
    if k < len(scores):
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        candidates = np.flatnonzero(scores >= threshold)
    else:
        candidates = np.arange(len(scores))
    order = np.argsort(-scores[candidates], kind="stable")
    return np.asarray(candidates[order[:k]], np.int64)
