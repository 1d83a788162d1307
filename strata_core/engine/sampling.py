"""Choosing the next token from logits.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, typical, top-p, min-p, then one
draw. Each filter sees the distribution that the ones before it left, renormalised. Log probabilities that are reported
are the model's own, before all of this.

Probabilities are float64. A vocabulary has a quarter of a million tokens, of which a filter mostly leaves some ten: so
only those that can matter are ranked and made probabilities of (:meth:`Sampler._candidates`), and what is needed of the
rest is the sum of their weights, a piece at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.scoring import Scoring
from strata_core.engine.requests import Sampling

Floats: TypeAlias = NDArray[np.float64]

#: How many tokens are tried first to reach ``top_p``, and how many times as many if they do not.
_FIRST, _MORE = 256, 8
#: Far more than the rounding of a sum of probabilities, far less than a token that anything depends on.
_ROUNDING = 1e-12
#: Tokens whose weights are summed at a time: their float64 stay in a core's own cache.
_PIECE = 8192


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities, float64: ``(vocab,)`` to ``(vocab,)``."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@attrs.frozen(eq=False)
class Scores:
    """A row of logits after bias, penalties and bans, which change few of them.

    :ivar rest: float32 ``(vocab,)``: as the model gave them; -inf in the places of those that were changed.
    :ivar ids: int64, ascending: the tokens that were changed; float64 ``values``: what they have become.
    """

    rest: np.ndarray
    ids: np.ndarray
    values: Floats

    @property
    def best(self) -> float:
        return float(max(self.rest.max(), self.values.max(initial=-np.inf)))

    def piece(self, start: int, stop: int) -> Floats:
        """The scores of tokens ``[start, stop)``."""
        scores = self.rest[start:stop].astype(np.float64)
        if len(self.ids):
            a, b = np.searchsorted(self.ids, (start, stop))
            scores[self.ids[a:b] - start] = self.values[a:b]
        return scores

    def weights(self, start: int, stop: int, best: float, temperature: float) -> Floats:
        """``exp((score - best) / temperature)`` of tokens ``[start, stop)``."""
        scores = self.piece(start, stop)
        scores -= best
        if temperature != 1:
            scores /= temperature
        return np.asarray(np.exp(scores, out=scores))

    def masses(self, best: float, temperature: float) -> Floats:
        """Sums of :meth:`weights` of the tokens, piece by piece."""
        starts = range(0, len(self.rest), _PIECE)
        return np.array([self.weights(a, a + _PIECE, best, temperature).sum() for a in starts])


class Sampler:
    """The sampling state of one request: its random stream, and the tokens that penalties look back on.

    :param prompt: int32 ids; the repetition penalty counts them, presence and frequency penalties do not.
    :param scoring: what to compute with, such as the backend.
    """

    def __init__(self, sampling: Sampling, prompt: np.ndarray, scoring: Scoring | None = None):
        self._sampling = sampling
        self._scoring = Scoring() if scoring is None else scoring
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

    def _adjusted(self, logits: np.ndarray, banned: frozenset[int]) -> Scores:
        s = self._sampling
        none = np.zeros(0, np.int64)
        seen = counted = none
        if s.repetition_penalty != 1 and self._seen:
            seen = np.unique(np.array(self._seen[-s.penalty_window :] if s.penalty_window else self._seen, np.int64))
        if s.presence_penalty or s.frequency_penalty:
            counted = np.fromiter(self._generated.keys(), np.int64, len(self._generated))
        out = np.fromiter(banned, np.int64, len(banned))
        ids = np.unique(np.concatenate([self._bias_ids, seen, counted, out]))
        if not len(ids):
            return Scores(logits, ids, np.zeros(0))
        values = logits[ids].astype(np.float64)
        values[np.searchsorted(ids, self._bias_ids)] += self._bias
        if len(seen):
            at = np.searchsorted(ids, seen)
            penalised = values[at]
            values[at] = np.where(penalised > 0, penalised / s.repetition_penalty, penalised * s.repetition_penalty)
        if len(counted):
            counts = np.fromiter(self._generated.values(), np.float64, len(self._generated))
            values[np.searchsorted(ids, counted)] -= s.presence_penalty + s.frequency_penalty * counts
        values[np.searchsorted(ids, out)] = -np.inf
        rest = logits.copy()
        rest[ids] = -np.inf
        return Scores(rest, ids, values)

    def _choose(self, scores: Scores) -> int:
        s = self._sampling
        if s.temperature == 0:
            return int(self._ranked(scores, 1)[0][0])
        if s.top_k == 0 and s.typical_p == 1 and s.top_p == 1 and s.min_p == 0:
            return self._draw_of_all(scores)
        ids, probabilities = self._candidates(scores)
        for keep, p in ((_typical, s.typical_p), (_top_p, s.top_p), (_min_p, s.min_p)):
            chosen = keep(probabilities, p)
            if chosen is not None:
                ids, probabilities = ids[chosen], probabilities[chosen]
                probabilities = probabilities / probabilities.sum()
        return int(ids[_draw(probabilities, self._random.random())])

    def _draw_of_all(self, scores: Scores) -> int:
        """A draw from all tokens in the order of their ids: first a piece of them, then one of the piece."""
        best, temperature = scores.best, self._sampling.temperature
        sums = scores.masses(best, temperature)
        target = self._random.random() * sums.sum()
        piece = _draw(sums, target)
        weights = scores.weights(piece * _PIECE, (piece + 1) * _PIECE, best, temperature)
        return piece * _PIECE + _draw(weights, target - sums[:piece].sum())

    def _ranked(self, scores: Scores, k: int) -> tuple[np.ndarray, Floats]:
        """Ids and scores of the ``k`` best tokens (all if there are not so many), best first and by id among equals."""
        k = min(k, len(scores.rest))
        ids = self._scoring.top(scores.rest, k)
        if not len(scores.ids):
            return ids, scores.rest[ids].astype(np.float64)
        ids = ids[~np.isin(ids, scores.ids)]  # where they are -inf only as they are not the model's
        values = np.concatenate([scores.rest[ids].astype(np.float64), scores.values])
        ids = np.concatenate([ids, scores.ids])
        order = np.lexsort((ids, -values))[:k]
        return ids[order], values[order]

    def _candidates(self, scores: Scores) -> tuple[np.ndarray, Floats]:
        """The tokens that filters may keep: ids and probabilities, best first where a filter ranks, else by id.

        Those that are left out are such as the filters drop in any case; what is given has the share of the
        probabilities that it would have beside them, except for ``min_p``, which compares with the best only.
        """
        s = self._sampling
        whole = len(scores.rest)
        if s.top_k > 0 or (s.typical_p < 1 and s.top_p < 1):
            ids, values = self._ranked(scores, s.top_k or whole)
        elif s.typical_p < 1:
            ids, values = np.arange(whole), scores.piece(0, whole)
        elif s.top_p < 1:
            return self._reaching_top_p(scores)
        else:
            ids, values = _not_far_below(scores, -s.temperature * np.log(s.min_p))
        probabilities = np.exp((values - values.max()) / s.temperature)
        return ids, probabilities / probabilities.sum()

    def _reaching_top_p(self, scores: Scores) -> tuple[np.ndarray, Floats]:
        """Enough of the best tokens to reach ``top_p``."""
        s, best, k = self._sampling, scores.best, _FIRST
        total = scores.masses(best, s.temperature).sum()
        while True:
            ids, values = self._ranked(scores, k)
            probabilities = np.exp((values - best) / s.temperature) / total
            if len(ids) == len(scores.rest) or probabilities.sum() > s.top_p + _ROUNDING:
                return ids, probabilities
            k *= _MORE


def _not_far_below(scores: Scores, distance: float) -> tuple[np.ndarray, Floats]:
    """Tokens whose scores are at most so far below the best (or, by rounding, a little farther), in order of ids."""
    least = scores.best - distance
    least -= 1e-6 * abs(least) + 1e-6
    ids = np.union1d(np.flatnonzero(scores.rest >= np.float32(least)), scores.ids[scores.values >= least])
    values = scores.rest[ids].astype(np.float64)
    changed = np.isin(ids, scores.ids)
    values[changed] = scores.values[np.searchsorted(scores.ids, ids[changed])]
    return ids, values


def _draw(weights: Floats, target: float) -> int:
    """The place where the running sum exceeds ``target``; where rounding leaves none, the last of any weight."""
    place = int(np.searchsorted(np.cumsum(weights), target, side="right"))
    return place if place < len(weights) else int(np.flatnonzero(weights)[-1])


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
