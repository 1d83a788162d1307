"""Models with recurrent state resume where a state was kept, and say the same as if they had not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow_disk
from engine_driver import Driver, ids, join
from slow_disk import Behaviour

from strata_core.errors import BackendError
from strata_core.plugins import Plugins
from strata_core.settings.core import BatchAgenda

Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["shadow_plugin", "slow_disk"], blocked=["tiers"])


@pytest.fixture
def cold() -> Iterator[Behaviour]:
    slow_disk.CONFIG.clear()
    slow_disk.CONFIG["cold"] = Behaviour()
    yield slow_disk.CONFIG["cold"]
    slow_disk.CONFIG.clear()


@pytest.fixture
def hybrid(driver: Make, tiny_hybrid_model: Path) -> Make:
    return lambda **fields: driver(**(dict(model=str(tiny_hybrid_model), prompt_cache_root=16) | fields))


@pytest.fixture
def fresh(hybrid: Make) -> Callable[..., Any]:
    """The reply to a prompt by an engine that reuses nothing."""
    cold = hybrid(conversation_cache=False)
    return lambda prompt, **fields: cold.ask(prompt, **fields).tokens


def opener(engine: Driver) -> int:
    return min(engine.core.keeper.openers)


def turns(engine: Driver, *texts: np.ndarray) -> np.ndarray:
    """A prompt of several turns, and the beginning of a reply."""
    parts = [part for text in texts for part in ((opener(engine),), text)]
    return join(*parts, (opener(engine),), ids(99, count=2))


def test_the_next_turn_resumes_at_the_end_and_the_reply_is_the_same(hybrid: Make, fresh: Any) -> None:
    engine = hybrid()
    prompt = ids(1, count=100)
    first = engine.ask(prompt)
    assert first.tokens == fresh(prompt)
    for seed in (2, 3):
        computed = len(prompt) + len(first.tokens) - 1
        prompt = join(prompt, first.tokens, ids(seed, count=20))
        first = engine.ask(prompt)
        assert first.started.cached_tokens == computed
        assert first.tokens == fresh(prompt)


def test_a_reply_is_made_again_from_the_last_turn_on(hybrid: Make, fresh: Any) -> None:
    engine = hybrid()
    prompt = turns(engine, ids(1, count=40), ids(2, count=51))
    at = len(prompt) - 3
    replies = [engine.ask(prompt) for _ in range(4)]
    assert [r.started.cached_tokens for r in replies] == [0, *[at - at % 8] * 3]
    assert {r.tokens for r in replies} == {fresh(prompt)}
    assert replies[1].record.reused == {"live": at - at % 8}


def test_others_with_the_same_system_prompt_resume_at_its_end(hybrid: Make, fresh: Any) -> None:
    engine = hybrid()
    system = ids(1, count=39)
    engine.ask(turns(engine, system, ids(2, count=30)))
    for seed in (3, 4, 5):
        prompt = turns(engine, system, ids(seed, count=30))
        reply = engine.ask(prompt)
        assert reply.started.cached_tokens == 40, "the page boundary at the second opener, which is the root"
        assert reply.tokens == fresh(prompt)


def test_a_prefix_that_the_client_names_is_where_others_resume(hybrid: Make, fresh: Any, cold: Behaviour) -> None:
    engine = hybrid(prompt_cache_root=2048, parallel=1)
    shared = ids(1, count=61)
    engine.ask(join(shared, ids(2, count=40)), prefix=61)
    for seed in (3, 4):
        prompt = join(shared, ids(seed, count=30))
        reply = engine.ask(prompt, prefix=61)
        assert reply.started.cached_tokens == 56
        assert reply.tokens == fresh(prompt)
    [level] = engine.core.keeper.ladder.below
    assert [(len(e.tokens), e.states) for e in level.entries() if e.root] == [(56, (56,))]


def test_long_prompts_keep_states_on_the_way(hybrid: Make, fresh: Any) -> None:
    engine = hybrid(prompt_cache_every=32)
    engine.ask(ids(1, count=200))
    prompt = join(ids(1, count=200)[:150], ids(2, count=20))
    reply = engine.ask(prompt)
    assert reply.started.cached_tokens == 128
    assert reply.tokens == fresh(prompt)
    assert reply.record.why == "diverged at position 150"


def test_no_more_states_are_kept_than_allowed_and_the_root_stays(hybrid: Make) -> None:
    engine = hybrid(prompt_cache=2, prompt_cache_every=16, parallel=1)
    engine.ask(turns(engine, ids(1, count=30), ids(2, count=200)))
    [live] = [slot.live for slot in engine.core.slots if slot.live is not None]
    assert live.positions is not None
    assert len(live.positions) == 3, "two, and the one at the end"
    assert 24 in live.positions, "the page boundary before the second opener"
    engine.core.park_all("switch")
    [entry] = engine.ram.entries()
    assert entry.states == live.positions or len(entry.states) == 3
    assert engine.states == 3


def test_a_cancelled_prompt_keeps_what_was_computed(hybrid: Make, fresh: Any) -> None:
    engine = hybrid(prompt_cache_every=0, batch_agenda=BatchAgenda(chunk=33, budget=40))
    prompt = ids(1, count=200)
    handle = engine.submit(prompt, max_tokens=4)
    for _ in range(3):
        engine.step()
    handle.cancel()
    engine.run()
    reply = engine.ask(prompt)
    assert reply.started.cached_tokens in (33 * 2, 33 * 3)
    assert reply.tokens == fresh(prompt)


def test_a_step_that_failed_is_repeated_on_the_state_it_began_with(hybrid: Make, fresh: Any, monkeypatch: Any) -> None:
    engine = hybrid()
    prompts = [ids(1, count=40), ids(2, count=44)]
    expected = [fresh(prompt) for prompt in prompts]
    forward, calls = engine.parts.model.forward, []

    def sometimes(batch: Any, stores: Any) -> Any:
        calls.append(len(batch.spans))
        logits = forward(batch, stores)
        if len(batch.spans) == 2 and len(calls) % 3 == 0:
            raise BackendError("told to fail after everything was written")
        return logits

    monkeypatch.setattr(engine.parts.model, "forward", sometimes)
    handles = [engine.submit(prompt, max_tokens=6) for prompt in prompts]
    engine.run()
    assert [handle.result().tokens for handle in handles] == expected
    assert engine.core.counters.step_failures > 0


def test_states_have_room_beside_parked_ones(hybrid: Make, fresh: Any) -> None:
    engine = hybrid(parallel=2, conversation_cache_mib=1, prompt_cache_every=16, prompt_cache=3)
    for seed in range(12):
        prompt = ids(seed, count=120)
        assert engine.ask(prompt, max_tokens=2).tokens == fresh(prompt, max_tokens=2)
        assert engine.ram.usage().bytes == engine.ram.weigh(engine.ram.entries()) <= 1 << 20
