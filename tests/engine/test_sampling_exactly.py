"""What samplers leave out makes no difference: the tokens are those of the definition, computed over everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.engine.requests import Sampling
from strata_core.engine.sampling import Sampler


class PlainSampler:
    """All filters over the probabilities of the whole vocabulary, in float64."""

    def __init__(self, sampling: Sampling, prompt: np.ndarray):
        self.sampling, self.random = sampling, np.random.default_rng(sampling.seed)
        self.seen, self.generated = prompt.tolist(), list[int]()

    def next(self, logits: np.ndarray, banned: frozenset[int]) -> int:
        s, scores = self.sampling, logits.astype(np.float64)
        for token, bias in s.logit_bias.items():
            scores[token] += bias
        window = self.seen[-s.penalty_window :] if s.penalty_window else self.seen
        for token in set(window):
            scores[token] *= s.repetition_penalty if scores[token] <= 0 else 1
            scores[token] /= s.repetition_penalty if scores[token] > 0 else 1
        for token in set(self.generated):
            scores[token] -= s.presence_penalty + s.frequency_penalty * self.generated.count(token)
        scores[list(banned)] = -np.inf
        token = self.choose(scores)
        self.seen.append(token)
        self.generated.append(token)
        return token

    def choose(self, scores: np.ndarray) -> int:
        s = self.sampling
        if s.temperature == 0:
            return int(np.argmax(scores))
        ids = np.arange(len(scores))
        if s.top_k or s.top_p < 1:
            ids = np.argsort(-scores, kind="stable")[: s.top_k or None]
        p = np.exp((scores[ids] - scores.max()) / s.temperature)
        p /= p.sum()
        if s.typical_p < 1:
            information = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
            nearest = np.argsort(np.abs(information - (p * information).sum()), kind="stable")
            kept = np.sort(nearest[: np.searchsorted(np.cumsum(p[nearest]), s.typical_p) + 1])
            ids, p = ids[kept], p[kept] / p[kept].sum()
        if s.top_p < 1:
            kept = np.arange(min(np.searchsorted(np.cumsum(p), s.top_p) + 1, len(p)))
            ids, p = ids[kept], p[kept] / p[kept].sum()
        if s.min_p > 0:
            kept = np.flatnonzero(p >= s.min_p * p.max())
            ids, p = ids[kept], p[kept] / p[kept].sum()
        return int(ids[min(np.searchsorted(np.cumsum(p), self.random.random(), side="right"), len(ids) - 1)])


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 40, 700, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.9, 0.999, 1 - 1e-13]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.7]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.4]),
    penalty_window=st.sampled_from([0, 3, 64]),
    logit_bias=st.sampled_from([{}, {}, {3: 100.0}, {0: -100.0, 2: 4.0, 1: 3.5}]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=150, deadline=None)
@given(
    sampling=samplings,
    vocabulary=st.sampled_from([5, 300, 2 * 8192, 20_001]),
    sharpness=st.sampled_from([0.0, 0.5, 3.0]),
    banned=st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 4})]),
)
def test_every_combination_of_filters_chooses_what_its_definition_does(
    sampling: Sampling, vocabulary: int, sharpness: float, banned: frozenset[int]
) -> None:
    random = np.random.default_rng(sampling.seed)
    prompt = random.integers(0, vocabulary, 10).astype(np.int32)
    own, plain = Sampler(sampling, prompt), PlainSampler(sampling, prompt)
    for _ in range(4):
        logits = (random.standard_normal(vocabulary) * sharpness).astype(np.float32)
        logits[random.integers(0, vocabulary, 3)] += 6
        before = logits.tobytes()
        assert own.next(logits, banned) == plain.next(logits, banned)
        assert logits.tobytes() == before


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(seed=1, top_p=0.9), Sampling(seed=1, min_p=0.1)])
def test_what_cannot_come_never_does(sampling: Sampling) -> None:
    logits = np.full(9000, -np.inf, np.float32)
    logits[[5, 8500]] = 1.0, 2.0
    sampler = Sampler(sampling, np.zeros(0, np.int32))
    assert {sampler.next(logits, frozenset({7, 8999})) for _ in range(60)} == {5, 8500}
    assert {sampler.next(logits, frozenset({8500})) for _ in range(20)} == {5}
