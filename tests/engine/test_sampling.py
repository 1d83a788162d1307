"""Sampling against distributions written down by hand."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.engine.requests import Sampling
from strata_core.engine.sampling import Sampler, log_softmax
from strata_core.errors import InvalidRequest
from strata_core.settings import CORE

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
NO_PROMPT = np.zeros(0, np.int32)


def frequencies(sampling: Sampling, logits: np.ndarray = LOGITS, draws: int = 4000) -> np.ndarray:
    sampler = Sampler(sampling, NO_PROMPT)
    counts = np.zeros(len(logits))
    for _ in range(draws):
        counts[sampler._choose(sampler._adjusted(logits, frozenset()))] += 1
    return counts / draws


def test_without_filters_the_distribution_is_the_models_own() -> None:
    assert np.abs(frequencies(Sampling(seed=1)) - [0.4, 0.3, 0.2, 0.1]).max() < 0.03


def test_temperature_sharpens_as_the_formula_says() -> None:
    expected = np.array([0.4, 0.3, 0.2, 0.1]) ** 2
    assert np.abs(frequencies(Sampling(seed=1, temperature=0.5)) - expected / expected.sum()).max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(seed=1, top_k=2), [0, 1]),
        (Sampling(seed=1, top_p=0.65), [0, 1]),
        (Sampling(seed=1, top_p=0.71), [0, 1, 2]),
        (Sampling(seed=1, top_p=0.0), [0]),
        (Sampling(seed=1, min_p=0.49), [0, 1, 2]),
        (Sampling(seed=1, min_p=1.0), [0]),
        (Sampling(seed=1, top_k=3, top_p=0.7), [0, 1]),  # 0.4 of 0.9, then 0.3: 0.78 reaches it
    ],
)
def test_filters_keep_exactly(sampling: Sampling, kept: list[int]) -> None:
    assert np.flatnonzero(frequencies(sampling, draws=1000)).tolist() == kept


def test_typical_sampling_drops_the_obvious_token_when_its_information_is_untypical() -> None:
    # Entropy 1.36 nats here; the informations are 0.51, 2.08 and 2.30: the first is nearest, then the 0.125s.
    logits = np.log(np.array([0.6, 0.125, 0.125, 0.1, 0.05], np.float32))
    information = -np.log([0.6, 0.125, 0.125, 0.1, 0.05])
    entropy = float((np.exp(-information) * information).sum())
    nearest = int(np.argmin(np.abs(information - entropy)))
    assert np.flatnonzero(frequencies(Sampling(seed=1, typical_p=0.05), logits, 500)).tolist() == [nearest]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert Sampler(Sampling(temperature=0), NO_PROMPT).next(np.array([1, 3, 3, 2], np.float32)) == 1


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(seed=seed), NO_PROMPT)
        return [sampler.next(logits) for _ in range(8)]

    assert draw(5) == draw(5) != draw(6)


def test_bias_and_ban_decide() -> None:
    assert Sampler(Sampling(temperature=0, logit_bias={3: 100.0}), NO_PROMPT).next(LOGITS) == 3
    assert Sampler(Sampling(temperature=0, logit_bias={0: -100.0}), NO_PROMPT).next(LOGITS) == 1
    assert Sampler(Sampling(temperature=0), NO_PROMPT).next(LOGITS, banned=frozenset({0})) == 1


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = np.array([2.0, 1.5, 0.0], np.float32)
    prompt = np.array([0, 0, 0], np.int32)
    presence = Sampler(Sampling(temperature=0, presence_penalty=1.0), prompt)
    assert [presence.next(logits) for _ in range(3)] == [0, 1, 0]
    frequency = Sampler(Sampling(temperature=0, frequency_penalty=0.3), prompt)
    assert [frequency.next(logits) for _ in range(4)] == [0, 0, 1, 0]  # 2.0, 1.7, (1.4 < 1.5), (1.4 > 1.2)


def test_repetition_penalty_looks_back_over_the_prompt_within_its_window() -> None:
    logits = np.array([2.0, 1.5, 0.0], np.float32)
    prompt = np.array([0, 2, 2], np.int32)
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0), prompt).next(logits) == 1
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0, penalty_window=2), prompt).next(logits) == 0
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0, penalty_window=0), prompt).next(logits) == 1


def test_log_probabilities_are_normalised_also_for_extreme_logits() -> None:
    logprobs = log_softmax(np.array([1e4, -1e4, 1e4], np.float32))
    assert np.isclose(np.exp(logprobs).sum(), 1.0)
    assert np.isclose(logprobs[0], np.log(0.5))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("top_p", 1.5), ("min_p", -0.1), ("top_k", -1),
     ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("logprobs", 21)],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=field) as error:
        Sampling(**{field: value})
    assert error.value.param == field


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_what_the_settings_allow_as_a_default_is_allowed_in_a_request(name: str) -> None:
    (spec,) = [spec for spec in CORE if spec.name == name]
    assert spec.minimum is not None and spec.maximum is not None
    low = None if name == "seed" else spec.minimum  # -1 draws a seed
    for value in (low, spec.maximum):
        assert getattr(Sampling(**{name: value}), name) == value
