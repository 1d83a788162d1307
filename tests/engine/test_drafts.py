"""Guessing ahead changes how soon tokens come, never which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import FIRST_ID, Driver, ids, join
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.drafts import LONGEST_PAUSE, TAILS, Drafter, look_up
from strata_core.engine.requests import Sampling
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_sparse

Make = Callable[..., Driver]

tokens = st.lists(st.integers(0, 3), max_size=30).map(lambda found: np.array(found, np.int32))


@given(tokens, st.integers(1, 6))
def test_a_draft_is_what_followed_the_longest_tail_where_it_stood_last(text: np.ndarray, count: int) -> None:
    expected: list[int] = []
    for tail in TAILS:
        places = [at for at in range(len(text) - tail) if list(text[at : at + tail]) == list(text[len(text) - tail :])]
        if places:
            expected = list(text[places[-1] + tail :][:count])
            break
    assert list(look_up(text, count)) == expected


def test_after_wrong_drafts_the_next_ones_wait_longer_and_longer_until_one_is_right() -> None:
    drafter, text = Drafter(4), np.array([1, 2, 3, 1, 2], np.int32)
    waits = []
    for _ in range(7):
        assert list(drafter.propose(text, 9)) == [3, 1, 2]
        drafter.learn(3, 0)
        waits.append(0)
        while drafter._pause:
            assert not len(drafter.propose(text, 9))
            waits[-1] += 1
    assert waits == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE]
    drafter.learn(3, 1)
    assert len(drafter.propose(text, 9))
    assert (drafter.drafted, drafter.accepted) == (24, 1)


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    text = np.array([1, 2, 3, 4, 1, 2], np.int32)
    assert list(Drafter(4).propose(text, 1)) == [3]
    assert not len(Drafter(4).propose(text, 0))
    assert not len(Drafter(0).propose(text, 5))


@pytest.fixture(params=["dense", "hybrid"])
def engines(request: pytest.FixtureRequest, driver: Make, tiny_hybrid_model: Path) -> Make:
    model = dict(model=str(tiny_hybrid_model)) if request.param == "hybrid" else {}
    return lambda **fields: driver(**(model | fields))


def repeating(*seed: int) -> np.ndarray:
    return np.tile(ids(*seed, count=13), 6)


@pytest.mark.parametrize("lookup", [1, 4, 9])
def test_replies_are_the_same_and_take_fewer_steps(engines: Make, lookup: int, monkeypatch: Any) -> None:
    plain, guessing = engines(), engines(lookup=lookup)
    for seed in range(2):
        prompt = repeating(seed)
        first = plain.ask(prompt, max_tokens=40)
        truth = join(prompt, first.tokens)

        def nearly_right(self: Drafter, text: np.ndarray, room: int, truth: np.ndarray = truth) -> np.ndarray:
            draft = truth[len(text) : len(text) + min(self.most, max(0, room))].copy()
            draft[(np.arange(len(text), len(text) + len(draft)) % 7) == 0] = FIRST_ID
            return draft

        monkeypatch.setattr(Drafter, "propose", nearly_right)
        second = guessing.ask(prompt, max_tokens=40)
        assert second.tokens == first.tokens
        record = second.record
        assert record.generated_tokens == 40
        assert 0 < record.accepted_tokens < record.drafted_tokens
    assert guessing.core.counters.steps < plain.core.counters.steps * (0.85 if lookup == 1 else 0.65)


def test_a_text_that_repeats_itself_is_guessed(driver: Make) -> None:
    plain, guessing = driver(), driver(lookup=6)
    for seed in range(3):
        assert guessing.ask(repeating(seed), max_tokens=60).tokens == plain.ask(repeating(seed), max_tokens=60).tokens
    counters = guessing.core.counters
    assert 0 < counters.accepted_tokens["lookup"] <= counters.drafted_tokens["lookup"]


def test_the_next_turn_resumes_from_what_was_guessed_right(engines: Make) -> None:
    plain, guessing = engines(conversation_cache=False), engines(lookup=5)
    prompt = repeating(2)
    for turn in range(3):
        reply = guessing.ask(prompt, max_tokens=25)
        assert reply.tokens == plain.ask(prompt, max_tokens=25).tokens
        if turn:
            # What had to be computed once more when the last reply ended, at most a draft and the token before it.
            assert reply.record.read_tokens <= 10 + 1 + 6
        prompt = join(prompt, reply.tokens, ids(7, turn, count=10))


@pytest.mark.parametrize("backend", ["numpy"], indirect=True)
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek2", "qwen3moe", "qwen4exp"])
def test_replies_of_every_family_are_the_same(driver: Make, family: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_sparse(path, seed=7) if family == "qwen4exp" else tiny_family(path, architecture=family, seed=7)
    plain, guessing = driver(model=str(path)), driver(model=str(path), lookup=4)
    truth = join(repeating(1), plain.ask(repeating(1), max_tokens=16).tokens)

    def partly_right(self: Drafter, text: np.ndarray, room: int) -> np.ndarray:
        draft = truth[len(text) :][: min(self.most, max(0, room))].copy()
        draft[2:] = FIRST_ID
        return draft

    monkeypatch.setattr(Drafter, "propose", partly_right)
    reply = guessing.ask(repeating(1), max_tokens=16)
    assert reply.tokens == tuple(truth[-16:].tolist())
    assert 0 < reply.record.accepted_tokens < reply.record.drafted_tokens


def test_several_replies_at_once_and_prompts_between_them(engines: Make) -> None:
    plain, guessing = engines(parallel=1), engines(parallel=4, lookup=6)
    prompts = [repeating(seed) for seed in range(6)]
    handles = [guessing.submit(prompt, max_tokens=20 + seed) for seed, prompt in enumerate(prompts)]
    guessing.run()
    for seed, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert handle.result().tokens == plain.ask(prompt, max_tokens=20 + seed).tokens


def test_sampling_draws_the_same_numbers(engines: Make) -> None:
    plain, guessing = engines(), engines(lookup=5)
    sampling = Sampling(temperature=0.05, seed=5, top_k=3, frequency_penalty=0.02)
    for seed in range(2):
        replies = [engine.ask(repeating(seed), max_tokens=25, sampling=sampling) for engine in (plain, guessing)]
        assert replies[0].tokens == replies[1].tokens


def test_rejected_drafts_hold_no_pages(engines: Make, monkeypatch: Any) -> None:
    engine = engines(lookup=8, parallel=1)
    wrong = lambda self, text, room: ids(3, len(text), count=min(8, max(room, 0)))  # noqa: E731
    monkeypatch.setattr(Drafter, "propose", wrong)
    handle = engine.submit(ids(1, count=30), max_tokens=30)
    while engine.step():
        [slot] = engine.core.slots
        if slot.live is not None:
            assert engine.pages == -(-len(slot.live.tokens) // 8)
    assert handle.result().tokens == engines().ask(ids(1, count=30), max_tokens=30).tokens
