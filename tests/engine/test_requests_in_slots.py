"""Queueing, cancelling, failing, ending: what happens to a request and to those beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver, ended, ids, join

from strata_core.engine.requests import Delta, Failed, Finished, Progress, Sampling, Started
from strata_core.errors import BackendError, Cancelled
from strata_core.settings.core import BatchAgenda

Make = Callable[..., Driver]


def test_requests_of_several_slots_are_computed_together_and_say_what_they_say_alone(driver: Make) -> None:
    prompts = [ids(c, count=20 + 17 * c) for c in range(5)]
    alone = [driver(parallel=1, conversation_cache=False).ask(p).tokens for p in prompts]
    engine = driver(parallel=3, batch_agenda=BatchAgenda(chunk=16, budget=18, age=2))
    handles = [engine.submit(p, max_tokens=6) for p in prompts]
    engine.run()
    assert [h.result().tokens for h in handles] == alone


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_the_reply_does_not_depend_on_the_chunks_a_prompt_is_read_in(driver: Make, chunk: int) -> None:
    prompt = ids(1, count=61)
    expected = driver(conversation_cache=False).ask(prompt).tokens
    agenda = BatchAgenda(chunk=chunk, budget=chunk + 8, age=4)
    assert driver(batch_agenda=agenda).ask(prompt).tokens == expected


def test_waiting_requests_start_in_order(driver: Make) -> None:
    engine = driver(parallel=1)
    handles = [engine.submit(ids(c, count=10), max_tokens=2) for c in range(4)]
    engine.run()
    results = [h.result().record for h in handles]
    assert [r.id for r in engine.records] == [h.id for h in handles] == [r.id for r in results]
    waited = [r.queued_s or 0.0 for r in results]
    assert waited == sorted(waited)


def test_a_request_tells_its_story_in_order(driver: Make) -> None:
    engine = driver(batch_agenda=BatchAgenda(chunk=16, budget=20, age=4))
    handle = engine.submit(ids(1, count=50), max_tokens=3, progress=True)
    engine.run()
    events = list(handle.events())
    assert isinstance(events[0], Started)
    assert events[0] == Started(50, 0, None)
    assert [e.processed for e in events if isinstance(e, Progress)] == [16, 32, 48]
    assert [len(e.tokens) for e in events if isinstance(e, Delta)][:3] == [1, 1, 1]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    record = events[-1].record
    assert (record.prompt_tokens, record.read_tokens, record.generated_tokens) == (50, 50, 3)
    assert record.why == "never stored"


def test_cancelled_while_it_waits_it_never_starts(driver: Make) -> None:
    engine = driver(parallel=1)
    running, waiting = engine.submit(ids(1, count=10), max_tokens=3), engine.submit(ids(2, count=10), max_tokens=3)
    engine.step()
    waiting.cancel()
    engine.step()
    last = ended(waiting)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Cancelled)
    engine.run()
    assert len(running.result().tokens) == 3
    assert engine.core.counters.requests == {"cancelled": 1, "length": 1}


@pytest.mark.parametrize("steps", range(1, 7))
def test_cancelled_while_its_prompt_is_read_the_complete_pages_remain(driver: Make, steps: int) -> None:
    prompt = ids(1, count=70)
    expected = driver(conversation_cache=False).ask(prompt).tokens
    engine = driver(parallel=1, batch_agenda=BatchAgenda(chunk=11, budget=12, age=4))
    handle = engine.submit(prompt, max_tokens=4)
    for _ in range(steps):
        engine.step()
    handle.cancel()
    engine.run()
    assert isinstance(ended(handle), Failed)
    assert all(slot.task is None for slot in engine.core.slots)
    reply = engine.ask(prompt)
    assert reply.started.cached_tokens == 11 * steps - 11 * steps % 8
    assert reply.tokens == expected


def test_cancelled_while_it_generates_the_slot_is_free_within_a_token(driver: Make) -> None:
    engine = driver(parallel=1)
    handle = engine.submit(ids(1, count=20), max_tokens=400)
    for _ in range(5):
        engine.step()
    handle.cancel()
    before = engine.core.counters.generated_tokens
    engine.step()
    assert engine.core.slots[0].task is None
    assert engine.core.counters.generated_tokens == before
    assert engine.core.slots[0].computed == 24 - 24 % 8


def test_two_hundred_one_shot_prompts_and_a_hundred_cancellations_leave_nothing_behind(driver: Make) -> None:
    engine = driver(parallel=4, conversation_cache_mib=1, conversation_cache_slots=8)
    rng = np.random.default_rng(1)
    for c in range(200):
        handle = engine.submit(ids(c, count=int(rng.integers(1, 60))), max_tokens=3)
        for _ in range(int(rng.integers(0, 3))):
            engine.step()
        if c % 2:
            handle.cancel()
    engine.run()
    engine.core.park_all("shutdown")
    usage = engine.ram.usage()
    assert usage.entries <= 8
    assert usage.bytes <= 1 << 20
    assert engine.core.keeper.pools[0].used * 4096 <= usage.bytes
    assert engine.core.keeper.pools[0].capacity <= engine.core.keeper.pools[0].store.chunk_pages


def test_a_failing_request_takes_no_other_with_it(driver: Make) -> None:
    engine = driver(parallel=3)
    good = [engine.submit(ids(c, count=20), max_tokens=5) for c in (1, 2)]
    bad = engine.submit(join(ids(3, count=20), (5,)), max_tokens=5)
    _fail_when(engine, lambda tokens: 5 in tokens[20:21] or (len(tokens) > 40 and tokens[-1] == 5))
    engine.run()
    last = ended(bad)
    assert isinstance(last, Failed)
    assert isinstance(last.error, BackendError)
    expected = [driver(conversation_cache=False).ask(ids(c, count=20), max_tokens=5).tokens for c in (1, 2)]
    assert [h.result().tokens for h in good] == expected
    assert engine.core.counters.step_failures >= 2


def test_a_failure_after_resuming_is_answered_by_reading_from_the_start_once(driver: Make) -> None:
    engine = driver(parallel=1)
    engine.ask(ids(1, count=40))
    engine.ask(ids(2, count=40))  # the first is parked
    prompt = join(ids(1, count=40), ids(3, count=5))
    fail = iter([True])
    _fail_when(engine, lambda tokens: next(fail, False))
    reply = engine.ask(prompt)
    assert reply.started == Started(45, 0, None)
    assert reply.record.reread[-1].reason == "damaged"
    assert reply.tokens == driver(conversation_cache=False).ask(prompt).tokens
    again = engine.ask(prompt)
    assert again.started.cached_tokens == 44


def test_a_model_that_computes_no_numbers_is_an_error_and_not_a_reply(driver: Make) -> None:
    engine = driver(parallel=1)
    model = engine.core._stepper._model
    original = model.forward
    model.forward = lambda batch, stores: original(batch, stores) * np.nan  # type: ignore[method-assign]
    handle = engine.submit(ids(1, count=10))
    engine.run()
    model.forward = original  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="not a number"):
        handle.result()
    assert engine.pages == 0, "nothing of it is kept"


def test_end_tokens_end_a_reply_unless_they_are_ignored(driver: Make) -> None:
    engine = driver()
    end = next(iter(engine.parts.tokenizer.end_ids))
    bias = Sampling(temperature=0, logit_bias={end: 1000.0})
    reply = engine.ask(ids(1, count=10), sampling=bias, ignore_eos=False)
    assert (reply.reason, reply.tokens, reply.text) == ("stop", (), "")
    assert reply.record.generated_tokens == 1
    reply = engine.ask(ids(1, count=10), sampling=bias, ignore_eos=True)
    assert reply.reason == "length"
    assert end not in reply.tokens


def test_a_stop_text_ends_the_reply_before_it(driver: Make) -> None:
    engine = driver()
    whole = engine.ask(ids(1, count=10), max_tokens=30).text
    middle = whole[8:11]
    place = whole.index(middle)
    reply = engine.ask(ids(1, count=10), max_tokens=30, stop=("never there", middle))
    assert (reply.text, reply.reason, reply.stop_text) == (whole[:place], "stop", middle)
    assert engine.ask(ids(1, count=10), max_tokens=30, stop=(whole[:1],)).text == ""
    # What only looked like the beginning of a stop text comes out in the end.
    assert engine.ask(ids(1, count=10), max_tokens=30, stop=(whole[-2:] + "x",)).text == whole


def test_a_full_context_ends_the_reply(driver: Make) -> None:
    engine = driver(max_context=64)
    reply = engine.ask(ids(1, count=60), max_tokens=None)
    assert (reply.reason, len(reply.tokens)) == ("length", 4)
    reply = engine.ask(ids(1, count=64), max_tokens=None)
    assert (reply.reason, len(reply.tokens)) == ("length", 1)


def test_choices_of_one_prompt_read_it_once(driver: Make) -> None:
    engine = driver(parallel=3)
    prompt = ids(1, count=80)
    first = engine.submit(prompt, max_tokens=4, sampling=Sampling(seed=1))
    others = [engine.submit(prompt, max_tokens=4, sampling=Sampling(seed=s), after=first.id) for s in (2, 3)]
    engine.run()
    first.result()
    # While the first generates, the others take its complete pages; the last of them ends the prompt.
    assert [h.result().started.cached_tokens for h in others] == [79, 79]


def test_more_choices_than_slots_still_end(driver: Make) -> None:
    engine = driver(parallel=1)
    first = engine.submit(ids(1, count=30), max_tokens=2)
    rest = [engine.submit(ids(1, count=30), max_tokens=2, after=first.id) for _ in range(3)]
    engine.run()
    assert len({h.result().tokens for h in [first, *rest]}) == 1


def test_log_probabilities_are_the_models(driver: Make) -> None:
    engine = driver()
    reply = engine.ask(ids(1, count=10), sampling=Sampling(temperature=0, logprobs=3))
    assert len(reply.logprobs) == len(reply.tokens)
    for token, info in zip(reply.tokens, reply.logprobs, strict=True):
        assert info.chosen.token == info.top[0].token == token
        assert len(info.top) == 3
        assert info.top[0].logprob >= info.top[1].logprob >= info.top[2].logprob
        assert info.chosen.logprob == info.top[0].logprob < 0


def test_counters_add_up(driver: Make) -> None:
    engine = driver()
    for seed in (1, 1, 2):
        engine.ask(ids(seed, count=30), max_tokens=4)
    counters = engine.core.counters
    assert counters.prompt_tokens == 90
    assert counters.reused == {"live": 29}
    assert counters.read_tokens == 61
    assert counters.generated_tokens == 12
    assert counters.prompt_tokens == counters.read_tokens + sum(counters.reused.values())


def _fail_when(engine: Driver, condition: Callable[[Sequence[int]], bool]) -> None:
    """Make the model raise in steps whose tokens meet a condition."""
    model: Any = engine.core._stepper._model
    original = model.forward

    def forward(batch: Any, stores: Any) -> Any:
        if condition(batch.tokens.tolist()):
            raise RuntimeError("injected")
        return original(batch, stores)

    model.forward = forward
