"""Choosing the next token from logits.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, typical, top-p, min-p, then one
draw. Each filter sees the distribution that the ones before it left, renormalised. Log probabilities that are reported
are the model's own, before all of this.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from strata_core.engine.requests import Sampling


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities, float64: ``(vocab,)`` to ``(vocab,)``."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


class Sampler:
    """The sampling state of one request: its random stream, and the tokens that penalties look back on.

    :param prompt: int32 ids; the repetition penalty counts them, presence and frequency penalties do not.
    """

    def __init__(self, sampling: Sampling, prompt: np.ndarray):
        self._sampling = sampling
        self._random = np.random.default_rng(None if sampling.seed is None else sampling.seed % 2**64)
        self._seen = [] if sampling.repetition_penalty == 1 else prompt.tolist()
        self._generated: Counter[int] = Counter()
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64, len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float64, len(sampling.logit_bias))
        penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        self._plain = sampling.temperature == 0 and not (penalties or sampling.logit_bias)

    def next(self, logits: np.ndarray, banned: frozenset[int] = frozenset()) -> int:
        """The next token.

        :param logits: float32 ``(vocab,)``; not changed.
        :param banned: ids that must not come (end tokens under ``ignore_eos``).
        """
        token = int(np.argmax(logits)) if self._plain else -1  # no copy of all scores where it makes no difference
        if token < 0 or token in banned:
            token = self._choose(self._adjusted(logits, banned))
        self._generated[token] += 1
        if self._sampling.repetition_penalty != 1:
            self._seen.append(token)
        return token

    def _adjusted(self, logits: np.ndarray, banned: frozenset[int]) -> np.ndarray:
        s = self._sampling
        scores = logits.astype(np.float64)
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if s.repetition_penalty != 1 and self._seen:
            window = self._seen[-s.penalty_window :] if s.penalty_window else self._seen
            ids = np.unique(np.array(window, np.int64))
            penalised = scores[ids]
            scores[ids] = np.where(penalised > 0, penalised / s.repetition_penalty, penalised * s.repetition_penalty)
        if (s.presence_penalty or s.frequency_penalty) and self._generated:
            ids = np.fromiter(self._generated.keys(), np.int64, len(self._generated))
            counts = np.fromiter(self._generated.values(), np.float64, len(self._generated))
            scores[ids] -= s.presence_penalty + s.frequency_penalty * counts
        if banned:
            scores[np.fromiter(banned, np.int64, len(banned))] = -np.inf
        return scores

    def _choose(self, scores: np.ndarray) -> int:
        s = self._sampling
        if s.temperature == 0:
            return int(np.argmax(scores))
        ranked = s.top_k > 0 or s.top_p < 1  # sorting a whole vocabulary takes milliseconds: only where it matters
        ids = _top_k(scores, s.top_k) if ranked else np.arange(len(scores))
        scores = (scores[ids] - scores[ids].max()) / s.temperature
        probabilities = np.exp(scores)
        probabilities /= probabilities.sum()
        for keep, p in ((_typical, s.typical_p), (_top_p, s.top_p), (_min_p, s.min_p)):
            chosen = keep(probabilities, p)
            if chosen is not None:
                ids, probabilities = ids[chosen], probabilities[chosen]
                probabilities = probabilities / probabilities.sum()
        # One draw by inversion; the last entry catches what rounding leaves of the sum.
        place = int(np.searchsorted(np.cumsum(probabilities), self._random.random(), side="right"))
        return int(ids[min(place, len(ids) - 1)])


def _top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the ``k`` highest scores (all for 0), best first and by id among equals."""
    if 0 < k < len(scores):
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        candidates = np.flatnonzero(scores >= threshold)
    else:
        candidates = np.arange(len(scores))
    order = np.argsort(-scores[candidates], kind="stable")
    ranked = candidates[order]
    return ranked[:k] if k > 0 else ranked


def _top_p(probabilities: np.ndarray, p: float) -> np.ndarray | None:
    """The most likely tokens until their probabilities sum to ``p``, at least one. They come sorted, best first."""
    if p >= 1:
        return None
    return np.arange(_reaching(probabilities, p))


def _typical(probabilities: np.ndarray, p: float) -> np.ndarray | None:
    """The tokens whose information is closest to the distribution's entropy, until they sum to ``p``."""
    if p >= 1:
        return None
    information = -np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    entropy = float((probabilities * information).sum())
    order = np.argsort(np.abs(information - entropy), kind="stable")
    return np.asarray(np.sort(order[: _reaching(probabilities[order], p)]))


def _min_p(probabilities: np.ndarray, p: float) -> np.ndarray | None:
    """Tokens at least ``p`` times as likely as the most likely one."""
    if p <= 0:
        return None
    return np.flatnonzero(probabilities >= p * probabilities.max())


def _reaching(probabilities: np.ndarray, p: float) -> int:
    """How many leading probabilities it takes to reach ``p``; at least 1, at most all."""
    return min(int(np.searchsorted(np.cumsum(probabilities), p)) + 1, len(probabilities))
