"""What is reused is exactly what was computed, and a reply with reuse is the reply without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_driver import FIRST_ID, VOCABULARY, Driver, ids, join

Make = Callable[..., Driver]


@pytest.fixture
def fresh(driver: Make) -> Callable[..., Any]:
    """Asks an engine that reuses nothing."""
    cold = driver(conversation_cache=False)

    def ask(prompt: np.ndarray, **fields: Any) -> Any:
        reply = cold.ask(prompt, **fields)
        assert reply.started.cached_tokens == 0
        assert reply.record.why == "reuse is off"
        return reply

    return ask


def test_the_next_turn_reads_only_what_is_new(driver: Make, fresh: Any) -> None:
    engine = driver()
    first = engine.ask(ids(1, count=100))
    prompt = join(ids(1, count=100), first.tokens, ids(2, count=20))
    second = engine.ask(prompt)
    # The last generated token was never fed back, so it is read with the new text.
    assert second.started.cached_tokens == 100 + len(first.tokens) - 1
    assert second.record.reused == {"live": 105}
    assert second.record.read_tokens == 21
    assert second.tokens == fresh(prompt).tokens


def test_the_same_prompt_again_reads_one_token_and_says_the_same(driver: Make, fresh: Any) -> None:
    engine, prompt = driver(), ids(1, count=77)
    replies = [engine.ask(prompt) for _ in range(4)]
    assert [r.started.cached_tokens for r in replies] == [0, 76, 76, 76]
    assert len({r.tokens for r in replies}) == 1
    assert replies[0].tokens == fresh(prompt).tokens


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 63, 64])
def test_a_strict_prefix_resumes_at_its_own_end(driver: Make, fresh: Any, length: int) -> None:
    engine = driver()
    engine.ask(ids(1, count=64))
    reply = engine.ask(ids(1, count=64)[:length])
    assert reply.started.cached_tokens == length - 1
    assert reply.tokens == fresh(ids(1, count=64)[:length]).tokens


@pytest.mark.parametrize("at", [0, 1, 7, 8, 50, 99])
def test_a_changed_prompt_resumes_where_it_differs(driver: Make, fresh: Any, at: int) -> None:
    engine = driver()
    engine.ask(ids(1, count=100))
    prompt = join(ids(1, count=100)[:at], ids(9, count=30))
    prompt[at] = ids(1, count=100)[at] ^ 1 if ids(1, count=100)[at] > 4 else 5
    reply = engine.ask(prompt)
    assert reply.started.cached_tokens == at
    assert reply.tokens == fresh(prompt).tokens
    # The conversation it branched off is whole: its own next turn resumes from all of it.
    again = engine.ask(join(ids(1, count=100), ids(3, count=4)))
    assert again.started.cached_tokens == 100
    assert again.tokens == fresh(join(ids(1, count=100), ids(3, count=4))).tokens


def test_two_conversations_with_one_beginning_both_resume_and_hold_it_once(driver: Make, fresh: Any) -> None:
    engine, system = driver(), ids(1, count=64)  # 8 complete pages
    engine.ask(join(system, ids(2, count=40)))
    alone = engine.pages
    engine.ask(join(system, ids(3, count=40)))
    assert engine.pages == 2 * alone - 8, "the system prompt's pages are shared"
    for seed in (2, 3):
        prompt = join(system, ids(seed, count=40), ids(seed, 5, count=10))
        reply = engine.ask(prompt)
        assert reply.started.cached_tokens == 104
        assert reply.tokens == fresh(prompt).tokens


def test_the_same_system_prompt_with_another_tail_is_reused_each_time(driver: Make) -> None:
    engine, system = driver(), ids(1, count=200)
    engine.ask(join(system, ids(50, count=10)))
    for call in range(5):
        reply = engine.ask(join(system, ids(60 + call, count=10)))
        assert reply.started.cached_tokens >= 200


def test_conversations_taking_turns_on_fewer_slots_never_read_twice(driver: Make, fresh: Any) -> None:
    engine = driver(parallel=2)
    histories = [ids(10 + c, count=60 + 5 * c) for c in range(4)]
    for turn in range(4):
        for c in range(4):
            reply = engine.ask(histories[c])
            if turn:
                assert reply.started.cached_tokens == len(histories[c]) - 12 - 1, f"round {turn}, conversation {c}"
                assert reply.record.reread == ()
            if turn == 3:
                assert reply.tokens == fresh(histories[c]).tokens
            histories[c] = join(histories[c], reply.tokens, ids(c, turn, count=12))
    assert engine.core.counters.reread == {}


@pytest.mark.parametrize("backend", ["numpy"], indirect=True)  # a device's pages must be parked before others come
def test_conversations_that_change_places_need_room_for_one_of_them(driver: Make) -> None:
    engine = driver(parallel=1)
    histories = [ids(10 + c, count=400) for c in range(2)]
    for turn in range(4):
        for c in range(2):
            reply = engine.ask(histories[c], max_tokens=4)
            histories[c] = join(histories[c], reply.tokens, ids(c, turn, count=4))
            if not turn:
                engine.ram._max_bytes = 60 * 4096 + 10_000  # 480 tokens and their ids
                assert engine.ram.usage().entries == c
    assert engine.core.counters.reread == {}
    assert engine.core.keeper.ladder.counts["evictions"] == engine.core.keeper.discards == 0


def test_with_room_for_two_the_ledger_names_what_was_evicted(driver: Make) -> None:
    engine = driver(parallel=1)
    engine.ram._max_bytes = 2 * 63 * 4096 + 20_000  # two conversations of 63 pages with their ids, not three
    prompts = [ids(c, count=500) for c in range(4)]
    for prompt in prompts:
        engine.ask(prompt, max_tokens=1)
    # 3 is live, 2 and 1 are parked, 0 was evicted when 2 was parked.
    kept = {tuple(e.tokens.tolist()) for e in engine.ram.entries()}
    assert kept == {tuple(prompts[c].tolist()) for c in (1, 2)}
    assert engine.core.keeper.ladder.counts["evictions"] == 1
    reply = engine.ask(join(prompts[0], ids(99, count=5)), max_tokens=1)
    assert reply.started.cached_tokens == 0
    assert [(r.tokens, r.reason) for r in reply.record.reread] == [(500, "evicted: budget")]
    assert engine.core.counters.reread == {"evicted: budget": 500}
    assert engine.ask(join(prompts[3], ids(98, count=5)), max_tokens=1).started.source == "ram"


def test_the_ram_budget_is_never_exceeded_and_one_too_large_is_refused_before_it_evicts(driver: Make) -> None:
    engine = driver(parallel=1, conversation_cache_mib=1, max_context=512)
    small = [ids(c, count=100) for c in range(3)]
    for prompt in small:
        engine.ask(prompt, max_tokens=1)
    page = engine.ram.weigh(engine.ram.entries())
    assert page == engine.ram.usage().bytes <= 1 << 20
    engine.ram._max_bytes = 50 * 4096  # room for the small ones, not for 63 pages
    engine.ask(ids(8, count=500), max_tokens=1)
    engine.ask(ids(9, count=50), max_tokens=1)
    assert engine.core.keeper.discards == 1
    assert engine.core.keeper.ladder.counts["evictions"] == 0
    assert {len(e.tokens) for e in engine.ram.entries()} == {100}
    reply = engine.ask(ids(8, count=500), max_tokens=1)
    assert [(r.tokens, r.reason) for r in reply.record.reread] == [(500, "discarded: no level has room")]


def test_without_ram_for_parking_a_displaced_conversation_is_a_counted_discard(driver: Make) -> None:
    engine = driver(parallel=1, conversation_cache_mib=0)
    first = engine.ask(ids(1, count=50))
    assert engine.ask(join(ids(1, count=50), first.tokens)).started.source == "live"
    engine.ask(ids(2, count=50))
    assert engine.core.keeper.discards == 1
    reply = engine.ask(ids(1, count=50))
    assert reply.started.cached_tokens == 0
    assert reply.record.reread[0].reason.startswith("discarded")


def test_a_switch_between_parked_conversations_copies_no_page(driver: Make, backend: str) -> None:
    engine = driver(parallel=1)
    store = engine.core.keeper.pools[0].store
    a, b = ids(1, count=400), ids(2, count=404)
    engine.ask(a, max_tokens=1)
    engine.ask(b, max_tokens=1)
    copies: list[tuple[int, int]] = []
    original = store.copy
    store.copy = lambda s, t: (copies.append((s, t)), original(s, t))[1]  # type: ignore[method-assign, func-returns-value]
    a, b = join(a, ids(3, count=5)), join(b, ids(4, count=5))
    assert engine.ask(a, max_tokens=1).started.cached_tokens == 400
    assert engine.ask(b, max_tokens=1).started.cached_tokens == 404
    assert copies == []


def test_requests_that_opt_out_neither_leave_nor_use_anything(driver: Make) -> None:
    engine = driver()
    apart = engine.ask(ids(1, count=50), cache=False)
    assert apart.started.cached_tokens == 0
    assert apart.record.why == "reuse is off"
    assert engine.pages == 0
    assert engine.ask(ids(1, count=50)).started.cached_tokens == 0
    assert engine.ask(ids(1, count=50), cache=False).started.cached_tokens == 0
    assert engine.ask(ids(1, count=50)).started.cached_tokens == 49


def test_tenants_never_see_each_others_conversations(driver: Make) -> None:
    engine = driver()
    engine.ask(ids(1, count=50), tenant="a")
    assert engine.ask(ids(1, count=50), tenant="b").started.cached_tokens == 0
    assert engine.ask(ids(1, count=50)).started.cached_tokens == 0
    assert engine.ask(ids(1, count=50), tenant="a").started.cached_tokens == 49


def test_a_pinned_conversation_outlives_newer_ones(driver: Make) -> None:
    engine = driver(parallel=1, conversation_cache_slots=2)
    engine.ask(ids(0, count=50), pin=True)
    for c in range(1, 6):
        engine.ask(ids(c, count=50))
    assert engine.ask(ids(0, count=50)).started.cached_tokens == 49
    assert engine.ask(ids(1, count=50)).started.cached_tokens == 0


def test_similarity_and_least_length_switch_small_matches_off(driver: Make) -> None:
    engine = driver(conversation_cache_similarity=0.5, conversation_cache_n_min=30)
    engine.ask(ids(1, count=100))
    assert engine.ask(join(ids(1, count=100)[:45], ids(2, count=55))).started.cached_tokens == 0
    assert engine.ask(join(ids(1, count=100)[:60], ids(3, count=40))).started.cached_tokens == 60
    engine.ask(ids(4, count=25))
    assert engine.ask(ids(4, count=25)).started.cached_tokens == 0


def test_a_reply_that_is_spelled_otherwise_is_followed_by_its_text(driver: Make) -> None:
    engine = driver()
    spell = engine.parts.tokenizer.token_bytes
    merged = next(i for i in range(FIRST_ID, VOCABULARY) if len(spell(i)) > 1)
    letters = {spell(i): i for i in range(FIRST_ID, VOCABULARY) if len(spell(i)) == 1}
    spelled = [letters[bytes([byte])] for byte in spell(merged)]
    stored = join(ids(1, count=40), (merged,), ids(2, count=10))
    engine.ask(stored, max_tokens=1)
    asked = join(ids(1, count=40), spelled, ids(2, count=10), ids(3, count=5))
    reply = engine.ask(asked)
    assert reply.started.cached_tokens == 51
    assert reply.started.prompt_tokens == 56, "the prompt goes on from the stored ids"
    # It is the reply to the text that was stored.
    plain = driver(conversation_cache=False).ask(join(stored, ids(3, count=5)))
    assert reply.tokens == plain.tokens

