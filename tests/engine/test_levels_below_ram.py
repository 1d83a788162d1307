"""Parking to RAM, to disk and to both; what happens when disks are late, full or broken."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import slow_disk
from engine_driver import Driver, ids, join
from slow_disk import Behaviour

from strata_core.plugins import Plugins
from strata_core.settings.core import BatchAgenda

Make = Callable[..., Driver]
PAGE = 4096


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["shadow_plugin", "slow_disk"], blocked=["tiers"])


@pytest.fixture
def disks() -> Iterator[dict[str, Behaviour]]:
    slow_disk.CONFIG.clear()
    yield slow_disk.CONFIG
    slow_disk.CONFIG.clear()


@pytest.fixture
def cold(disks: dict[str, Behaviour]) -> Behaviour:
    disks["cold"] = Behaviour()
    return disks["cold"]


def places(engine: Driver) -> dict[str, list[int]]:
    """Lengths of the conversations that each level lists, roots left out."""
    levels = engine.core.keeper.ladder.levels
    return {level.name: sorted(len(e.tokens) for e in level.entries() if not e.root) for level in levels}


def alternate(engine: Driver, rounds: int = 3, agents: int = 3, grow: int = 10) -> list[Any]:
    """Conversations taking turns on one slot; returns all replies."""
    histories = [ids(c, count=60) for c in range(agents)]
    replies = []
    for turn, c in itertools.product(range(rounds), range(agents)):
        reply = engine.ask(histories[c], max_tokens=3)
        replies.append(reply)
        histories[c] = join(histories[c], reply.tokens, ids(c, turn, count=grow))
    return replies


@pytest.mark.parametrize("delay", [0, 1, 7, 10_000])
@pytest.mark.parametrize(
    "mode",
    [
        dict(conversation_cache_park="ram"),
        dict(conversation_cache_park="ram", conversation_cache_spill_on="evict", conversation_cache_slots=1),
        dict(conversation_cache_park="ram", conversation_cache_slots=1),
        dict(conversation_cache_park="disk"),
        dict(conversation_cache_disk_only=True),
    ],
)
def test_in_every_mode_every_later_turn_resumes_and_replies_do_not_change(
    driver: Make, cold: Behaviour, mode: dict[str, Any], delay: int
) -> None:
    expected = alternate(driver(parallel=1, conversation_cache=False))
    cold.delay = delay
    engine = driver(parallel=1, **mode)
    replies = alternate(engine)
    assert [r.tokens for r in replies] == [r.tokens for r in expected]
    for reply in replies[3:]:
        assert reply.record.read_tokens == 11, "ten new tokens and the one that was never fed back"
        assert reply.record.reread == ()
    assert engine.core.keeper.discards == 0


def test_parking_to_disk_leaves_nothing_in_ram(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_park="disk")
    alternate(engine, rounds=1)
    engine.step()
    assert places(engine) == {"ram": [], "cold": [62, 62]}
    assert engine.pages == 8, "only the live conversation's pages are left"


def test_parking_to_ram_is_mirrored_below(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1)
    alternate(engine, rounds=1)
    engine.step()
    assert places(engine) == {"ram": [62, 62], "cold": [62, 62]}
    assert engine.core.keeper.ladder.counts["spilled"] == 2
    assert engine.core.keeper.ladder.counts["demotions"] == 0


def test_what_ram_evicts_and_disk_has_is_a_demotion_without_a_write(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_slots=1)
    alternate(engine, rounds=1)
    engine.step()
    assert places(engine) == {"ram": [62], "cold": [62, 62]}
    assert engine.core.keeper.ladder.counts["demotions"] == 1
    assert engine.core.keeper.ladder.counts["evictions"] == 0
    assert engine.core.keeper.ladder.counts["spilled"] == 2


def test_with_spill_on_evict_only_victims_are_written(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_slots=1, conversation_cache_spill_on="evict")
    alternate(engine, rounds=1)
    engine.step()
    assert places(engine) == {"ram": [62], "cold": [62]}


def test_older_states_of_a_conversation_go_after_the_newer_one_is_written(driver: Make, cold: Behaviour) -> None:
    cold.delay = 3
    engine = driver(parallel=1)
    alternate(engine, rounds=4)
    for _ in range(5):
        engine.step()
    assert all(len(lengths) <= 3 for lengths in places(engine).values())
    assert engine.core.keeper.ladder.counts["superseded"] >= 4


def test_the_throttle_collapses_a_burst_to_the_newest_state(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_spill_park_throttle_s=3600.0)
    alternate(engine, rounds=4)
    assert engine.core.keeper.ladder.counts["spilled"] == 3, "one write for each conversation"
    engine.core.shut_down()
    newest = sorted(len(e.tokens) for e in engine.ram.entries())
    assert places(engine)["cold"] == newest, "what was held back is written at the end"


def test_a_write_that_fails_costs_nothing_while_ram_has_the_conversation(driver: Make, cold: Behaviour) -> None:
    cold.fail_writes = True
    engine = driver(parallel=1)
    replies = alternate(engine)
    assert all(r.record.reread == () for r in replies)
    assert engine.core.keeper.ladder.counts["spill_failures"] > 0
    assert engine.core.keeper.discards == 0
    cold.fail_writes = False
    alternate(engine, rounds=1)
    assert engine.core.keeper.ladder.counts["spilled"] > 0, "the level is used again when it works"


def test_a_failed_write_of_what_was_bound_for_disk_falls_back_to_ram(driver: Make, cold: Behaviour) -> None:
    cold.fail_writes = True
    engine = driver(parallel=1, conversation_cache_park="disk")
    replies = alternate(engine)
    assert all(r.record.reread == () for r in replies)
    assert engine.core.keeper.discards == 0
    assert places(engine)["cold"] == []


def test_with_nowhere_to_go_it_is_a_counted_discard_with_its_reason(driver: Make, cold: Behaviour) -> None:
    cold.fail_writes = True
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    replies = alternate(engine, rounds=2)
    assert engine.core.keeper.discards >= 3
    assert {r.reason for reply in replies[3:] for r in reply.record.reread} == {"discarded: level cold failed"}


def test_a_full_ladder_moves_the_oldest_down_and_only_the_last_level_deletes(
    driver: Make, disks: dict[str, Behaviour]
) -> None:
    disks["warm"] = Behaviour(max_bytes=16 * PAGE)
    disks["cold"] = Behaviour(max_bytes=16 * PAGE)
    engine = driver(parallel=1, conversation_cache_disk_only=True, system_prompt_cache=False)
    for c in range(7):
        engine.ask(ids(c, count=60), max_tokens=1)
        for _ in range(3):
            engine.step()
    # Each holds two conversations of 8 pages; the seventh is live.
    counts = engine.core.keeper.ladder.counts
    assert places(engine) == {"warm": [60, 60], "cold": [60, 60]}
    assert (counts["demotions"], counts["disk_evictions"], counts["evictions"]) == (4, 2, 0)
    reply = engine.ask(join(ids(0, count=60), (7,)), max_tokens=1)
    assert [(r.tokens, r.reason) for r in reply.record.reread] == [(60, "evicted: budget")]
    assert engine.ask(join(ids(3, count=60), (7,)), max_tokens=1).started.source in ("warm", "cold")


def test_when_the_level_below_refuses_the_entry_stays_and_the_newcomer_is_refused(
    driver: Make, disks: dict[str, Behaviour]
) -> None:
    disks["warm"] = Behaviour(max_bytes=16 * PAGE)
    disks["cold"] = Behaviour(refuse=True)
    engine = driver(parallel=1, conversation_cache_disk_only=True, system_prompt_cache=False)
    for c in range(4):
        engine.ask(ids(c, count=60), max_tokens=1)
        engine.step()
    kept = {tuple(e.tokens[:3].tolist()) for e in engine.core.keeper.ladder.levels[0].entries()}
    assert kept == {tuple(ids(c, count=60)[:3].tolist()) for c in (0, 1)}
    assert engine.core.keeper.discards == 1
    assert engine.core.keeper.ladder.counts["demotions"] == 0


def test_what_arrives_below_while_a_request_resumes_it_leaves_its_level_afterwards(
    driver: Make, disks: dict[str, Behaviour]
) -> None:
    disks["warm"] = Behaviour(max_bytes=16 * PAGE, gate=threading.Event())
    disks["cold"] = Behaviour(delay=40)
    engine = driver(parallel=1, conversation_cache_disk_only=True, system_prompt_cache=False)
    for c in range(4):  # the fourth takes the place of the third, which takes that of the first, which moves
        engine.ask(ids(c, count=60), max_tokens=1)
    ladder = engine.core.keeper.ladder
    assert (places(engine)["cold"], ladder.counts["demotions"]) == ([60], 0)
    handle = engine.submit(join(ids(0, count=60), (9,)), max_tokens=1)
    for _ in range(60):
        engine.step()
    disks["warm"].gate.set()
    engine.run()
    engine.core.working_behind()
    assert handle.result().started.cached_tokens == 60
    assert engine.core.keeper.restore_failures == 0
    assert (places(engine), ladder.counts["demotions"]) == ({"warm": [60, 60], "cold": [60, 60]}, 2)


def test_a_damaged_entry_is_read_again_in_the_same_call_and_never_offered_twice(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    prompt = ids(1, count=60)
    engine.ask(prompt, max_tokens=1)
    engine.ask(ids(2, count=60), max_tokens=1)
    engine.step()
    cold.damaged |= {e.id for e in engine.core.keeper.ladder.levels[0].entries()}
    expected = driver(conversation_cache=False).ask(join(prompt, (9,))).tokens
    reply = engine.ask(join(prompt, (9,)))
    assert reply.tokens == expected
    assert reply.started.cached_tokens == 0
    assert [(r.tokens, r.reason) for r in reply.record.reread] == [(60, "damaged")]
    assert engine.core.keeper.restore_failures == 1
    engine.ask(ids(3, count=60), max_tokens=1)
    assert engine.ask(join(prompt, (9,))).started.cached_tokens == 60, "what was read again was kept again"


def test_other_slots_go_on_while_something_is_restored(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=2, conversation_cache_disk_only=True)
    engine.ask(ids(1, count=60), max_tokens=1)
    for c in (2, 3):
        engine.ask(ids(c, count=60), max_tokens=1)
    engine.step()
    cold.gate = threading.Event()
    busy = engine.submit(ids(4, count=10), max_tokens=400)
    back = engine.submit(join(ids(1, count=60), (9,)), max_tokens=2)
    for _ in range(10):
        engine.step()
    assert [slot.restoring for slot in engine.core.slots].count(True) == 1
    generated = engine.core.counters.generated_tokens
    assert generated >= 8
    cold.gate.set()
    busy.cancel()
    engine.run()
    assert back.result().started.cached_tokens == 60


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_cancelled_while_it_is_restored_nothing_leaks(driver: Make, cold: Behaviour, steps: int) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    engine.ask(ids(1, count=60), max_tokens=1)
    engine.ask(ids(2, count=60), max_tokens=1)
    engine.step()
    cold.load_s = 0.05
    handle = engine.submit(join(ids(1, count=60), (9,)), max_tokens=2)
    for _ in range(steps):
        engine.step()
    handle.cancel()
    engine.run()
    assert engine.ask(join(ids(1, count=60), (9,))).started.cached_tokens == 60


def believe_slow(engine: Driver) -> None:
    """As if the cold level had been read at a byte per second."""
    engine.core.keeper.read_rate = 1e6
    engine.core.keeper.restorer.rates.observe("cold", 1.0)


def test_a_level_that_was_slow_once_is_tried_again_after_a_while(
    driver: Make, cold: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    for c in (1, 2):
        engine.ask(ids(c, count=60), max_tokens=1)
    engine.step()
    believe_slow(engine)
    assert engine.ask(join(ids(1, count=60), (9,)), max_tokens=1).started.cached_tokens == 0
    engine.ask(ids(3, count=60), max_tokens=1)
    monkeypatch.setattr("strata_core.conversations.restoring.RATE_COUNTS_S", 0.0)
    assert engine.ask(join(ids(2, count=60), (9,)), max_tokens=1).started.cached_tokens == 60


def test_reading_is_chosen_where_it_is_faster_and_said_so(
    driver: Make, cold: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    for c in (1, 2):
        engine.ask(ids(c, count=60), max_tokens=1)
    engine.step()
    believe_slow(engine)
    with caplog.at_level("INFO", "strata.cache"):
        assert engine.ask(join(ids(1, count=60), (9,)), max_tokens=1).started.cached_tokens == 0
    assert any("ladder: rung cold refused (reading 60 tokens" in r.message for r in caplog.records)
    always = driver(parallel=1, conversation_cache_disk_only=True, restore_when="always")
    for c in (1, 2):
        always.ask(ids(c, count=60), max_tokens=1)
    always.step()
    believe_slow(always)
    assert always.ask(join(ids(1, count=60), (9,)), max_tokens=1).started.cached_tokens == 60


@pytest.mark.parametrize("why", ["slow", "unreadable"])
def test_a_level_that_many_conversations_cannot_be_had_from_is_not_asked_for_each(
    driver: Make, cold: Behaviour, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    for c in range(9):
        engine.ask(join(ids(1, count=40), ids(c, 2, count=20)), max_tokens=1)
    engine.step()
    if why == "slow":
        believe_slow(engine)
    else:
        cold.unreadable = True
    prompt = ids(5, count=10)
    engine.ask(prompt, max_tokens=1)  # so that nothing is live that shares anything
    with caplog.at_level("INFO", "strata.cache"):
        assert engine.ask(join(ids(1, count=40), (9,)), max_tokens=1).started.cached_tokens == 0
    refused = [r.message for r in caplog.records if "ladder: rung cold refused" in r.message]
    assert len(refused) == (1 if why == "slow" else 3)
    if why == "unreadable":
        cold.unreadable = False
        engine.ask(prompt, max_tokens=1)
        assert engine.ask(join(ids(1, count=40), (8,)), max_tokens=1).started.cached_tokens == 40


def test_under_memory_pressure_a_park_goes_through_to_disk_or_is_discarded(driver: Make, cold: Behaviour) -> None:
    engine = driver(
        parallel=1, conversation_cache_min_free_mib=100, conversation_cache_park_min_free_mib=10, max_context=64
    )
    free = {"mib": 50}
    engine.core.keeper.parking.available = lambda: free["mib"] << 20
    engine.ask(ids(1, count=30), max_tokens=1)
    engine.ask(ids(2, count=30), max_tokens=1)
    engine.step()
    assert places(engine) == {"ram": [], "cold": [30]}
    free["mib"] = 5
    engine.ask(ids(3, count=30), max_tokens=1)
    assert engine.core.keeper.discards == 1
    free["mib"] = 500
    engine.ask(ids(4, count=30), max_tokens=1)
    assert places(engine)["ram"] == [30]


def test_clean_shutdown_puts_every_conversation_on_disk(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=2, conversation_cache_spill_on="evict")
    for c in range(5):
        engine.ask(ids(c, count=60), max_tokens=1)
    engine.core.shut_down()
    assert places(engine)["cold"] == [60] * 5


def test_a_system_prompt_outlives_the_conversations_that_began_with_it(driver: Make, cold: Behaviour) -> None:
    engine = driver(parallel=1, conversation_cache_disk_only=True)
    opener = next(iter(engine.core.keeper.openers))
    system = join((opener,), ids(50, count=63))
    for c in range(2):
        engine.ask(join(system, (opener,), ids(c, count=20)), max_tokens=1)
    engine.ask(ids(9, count=60), max_tokens=1)
    engine.step()
    level = engine.core.keeper.ladder.levels[0]
    roots = [e for e in level.entries() if e.root]
    assert [len(e.tokens) for e in roots] == [64]
    for entry in [e for e in level.entries() if not e.root]:
        level.remove(entry)
    reply = engine.ask(join(system, (opener,), ids(30, count=20)), max_tokens=1)
    assert (reply.started.cached_tokens, reply.started.source) == (64, "cold")


@pytest.mark.parametrize("slots", [0, 1])
def test_a_system_prompt_that_moved_down_is_not_kept_again_and_counts(
    driver: Make, disks: dict[str, Behaviour], slots: int
) -> None:
    disks["warm"], disks["cold"] = Behaviour(max_bytes=16 * PAGE), Behaviour()
    engine = driver(parallel=1, conversation_cache_disk_only=True, system_prompt_cache_slots=slots)
    opener = next(iter(engine.core.keeper.openers))

    def begin(system: int, seed: int) -> None:
        engine.ask(join((opener,), ids(system, count=31), (opener,), ids(seed, count=90)), max_tokens=1)
        for _ in range(3):
            engine.step()

    def roots() -> int:
        return sum(entry.root for level in engine.core.keeper.ladder.levels for entry in level.entries())

    for seed in range(6):  # each fills the warm level, so that all else there moves
        begin(50, seed)
    assert roots() == 1
    for seed in range(6, 9):
        begin(51, seed)
    assert roots() == (slots or 2)


@pytest.mark.parametrize(("park", "fails"), [("ram", False), ("disk", False), ("disk", True)])
def test_a_history_that_its_client_rewrote_is_compacted(
    driver: Make, cold: Behaviour, park: str, fails: bool
) -> None:
    """Also where the disk that it was bound for does not take it."""
    cold.fail_writes = fails
    engine = driver(parallel=1, conversation_cache_spill_divergence_tokens=200, conversation_cache_park=park)
    opener = next(iter(engine.core.keeper.openers))
    header = join((opener,), ids(1, count=15), (opener,), ids(2, count=15), (opener,))
    long = join(header, ids(3, count=100))
    engine.ask(long, max_tokens=1)
    compacted = join(header, ids(4, count=20))
    engine.ask(compacted, max_tokens=1)
    engine.ask(ids(8, count=20), max_tokens=1)  # the compacted history is parked
    engine.step()
    assert engine.core.keeper.parking.counts["compacted"] >= 1
    assert not any(length > 120 for level in places(engine).values() for length in level)


def test_levels_that_share_no_way_hand_entries_down_through_memory(driver: Make, disks: dict[str, Behaviour]) -> None:
    disks["warm"] = Behaviour(max_bytes=16 * PAGE)
    disks["cold"] = Behaviour(adopts=False)
    engine = driver(parallel=1, conversation_cache_disk_only=True, system_prompt_cache=False)
    prompts = [ids(c, count=60) for c in range(4)]
    for prompt in prompts:
        engine.ask(prompt, max_tokens=1)
        for _ in range(3):
            engine.step()
    assert places(engine) == {"warm": [60, 60], "cold": [60]}
    assert engine.core.keeper.ladder.counts["demotions"] == 1
    reply = engine.ask(join(prompts[0], (9,)))
    assert (reply.started.cached_tokens, reply.started.source) == (60, "cold")
    assert reply.tokens == driver(conversation_cache=False).ask(join(prompts[0], (9,))).tokens


def test_a_prefix_that_was_not_read_to_its_end_is_no_root(
    driver: Make, cold: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    engine = driver(parallel=1, batch_agenda=BatchAgenda(chunk=16, budget=20))
    handle = engine.submit(ids(1, count=100), max_tokens=1, prefix=80)
    engine.step()
    handle.cancel()
    engine.ask(ids(2, count=60), max_tokens=1)
    engine.step()
    [level] = engine.core.keeper.ladder.below
    assert [(len(e.tokens), e.root) for e in level.entries()] == [(16, False)]
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "no level is to blame"
