"""What budgets, floors, rates and levels do in a replay."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from strata_core.errors import SettingsError
from strata_core.simulate.changes import parse_changes
from strata_core.simulate.config import MIB, Changes, SimConfig
from strata_core.simulate.generate import Agents, agents_trace
from strata_core.simulate.outcome import Outcome
from strata_core.simulate.replay import Replay
from strata_core.simulate.trace import Trace, read_trace

#: Six agents on two slots; a conversation is about 1,000 tokens, 16 MiB.
SHAPE = Agents(
    agents=6, rounds=4, system=200, first=600, grow=50, reply=30, gap_s=20, stagger_s=3, token_bytes=16384, parallel=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(agents_trace(SHAPE))


def run(trace: Trace, until: float = float("inf"), **changes: Any) -> Outcome:
    base: dict[str, Any] = dict(ram_mib=0, read_rate=500.0, generate_rate=50.0)
    return Replay(trace, Changes(**(base | changes)).apply(SimConfig.of_trace(trace))).run(until)


def test_every_prompt_token_is_reused_or_read(trace: Trace) -> None:
    for changes in ({}, {"ram_mib": 40}, {"ram_mib": 500}, {"cold_mib": 500}, {"cold_mib": 40, "ram_mib": 40}):
        outcome = run(trace, **changes)
        assert outcome.requests == sum(outcome.hits.values()) == 24
        assert outcome.unfinished == 0
        assert outcome.prompt == sum(outcome.reused.values()) + outcome.read == sum(i.prompt for i in trace.items)
        assert sum(tokens for _, tokens in outcome.rereads) == outcome.reread_tokens
        assert outcome.reading_s == pytest.approx(outcome.read / 500)


def test_more_ram_reads_less_again_until_nothing_is(trace: Trace) -> None:
    again = [run(trace, ram_mib=mib).reread_tokens for mib in (0, 20, 60, 500)]
    assert again[0] > 8000
    assert again == sorted(again, reverse=True)
    assert again[-1] == 0


def test_a_level_below_ram_saves_what_ram_cannot(trace: Trace) -> None:
    outcome = run(trace, cold_mib=500)
    assert outcome.reread_tokens == 0
    assert outcome.hits["cold"] > 10
    assert outcome.counts["discards"] == 0
    assert outcome.written["cold"] > 6 * 800 * 16384


def test_a_conversation_that_grew_writes_what_is_new(trace: Trace) -> None:
    most = max(item.computed for item in trace.items)
    assert run(trace, cold_mib=500).written["cold"] < 6 * most * 16384 * 1.5


def test_a_small_cold_level_deletes_and_says_so(trace: Trace) -> None:
    outcome = run(trace, cold_mib=40)
    assert outcome.counts["disk_evictions"] > 5
    assert outcome.reread["evicted: budget"] == outcome.reread_tokens > 0


def test_what_warm_lets_go_comes_to_cold(trace: Trace) -> None:
    outcome = run(trace, warm_mib=40, cold_mib=500)
    assert outcome.counts["demotions"] > 5
    assert outcome.counts["disk_evictions"] == outcome.reread_tokens == 0
    assert outcome.hits["cold"] > 10
    assert outcome.written["warm"] > outcome.written["cold"] > 0


def test_floors_refuse_what_memory_does_not_hold(trace: Trace) -> None:
    slots = 2 * 1100 * 16384 // MIB + 2
    roomy = run(trace, ram_mib=500, host_mib=slots + 200, min_free_mib=0, park_min_free_mib=0)
    tight = run(trace, ram_mib=500, host_mib=slots + 200, min_free_mib=180, park_min_free_mib=180)
    assert roomy.reread_tokens == 0
    assert tight.reread_tokens > 1000


def test_a_slow_disk_is_not_restored_from_once_its_rate_is_known(trace: Trace) -> None:
    slow = {"cold": 0.5}  # a conversation of 16 MB in half a minute; it is read in two seconds
    weighed = run(trace, cold_mib=500, restore_rate=slow)
    always = run(trace, cold_mib=500, restore_rate=slow, restore_when="always")
    assert 0 < weighed.restoring_s["cold"] < always.restoring_s["cold"] / 3
    assert weighed.read > 3 * always.read
    assert always.restoring_s["cold"] == pytest.approx(always.reused["cold"] * 16384 / 0.5e6, rel=0.05)


def test_a_restore_takes_as_long_as_its_level_is_slow(trace: Trace) -> None:
    fast, slow = (
        run(trace, cold_mib=500, restore_when="always", restore_rate={"cold": rate}) for rate in (1000.0, 5.0)
    )
    assert fast.reused == slow.reused
    assert sum(slow.first_token_s) > sum(fast.first_token_s) + 20


def test_nothing_is_written_while_the_throttle_holds_it_back(trace: Trace) -> None:
    free = run(trace, ram_mib=500, cold_mib=500)
    held = run(trace, ram_mib=500, cold_mib=500, throttle_s=60.0)
    assert 0 < held.counts["spilled"] < free.counts["spilled"]


def test_a_replay_stops_where_it_is_told(trace: Trace) -> None:
    whole = run(trace)
    part = run(trace, until=40.0)
    assert part.seconds <= 40 < whole.seconds
    assert part.requests + part.unfinished == 24
    assert 0 < part.read < whole.read


def test_the_same_trace_comes_to_the_same(trace: Trace) -> None:
    one, other = (run(trace, ram_mib=40, cold_mib=60) for _ in range(2))
    assert one == other


def test_turns_wait_for_the_reply_they_go_on_from_or_come_when_they_came(trace: Trace) -> None:
    slow = {"read_rate": 20.0}
    waiting = run(trace, **slow)
    assert max(waiting.first_token_s) < run(trace, arrivals="recorded", **slow).first_token_s[-1]
    assert run(trace, arrivals="order", **slow).requests == 24


def test_requests_without_a_reply_leave_complete_pages() -> None:
    lines = list(agents_trace(attrs.evolve(SHAPE, agents=1, rounds=2)))
    cut = lines[1].replace('"status":"stop"', '"status":"cancelled"').replace('"computed":829', '"computed":320')
    assert cut.count("cancelled") == cut.count('"computed":320') == 1
    outcome = run(read_trace([line + "\n" for line in (lines[0], cut, lines[2])]), cold_mib=100)
    assert outcome.reused["live"] == 320


def test_agents_are_the_same_for_the_same_numbers_and_others_for_another_seed() -> None:
    assert list(agents_trace(SHAPE)) == list(agents_trace(SHAPE))
    assert list(agents_trace(SHAPE))[1] != list(agents_trace(attrs.evolve(SHAPE, seed=1)))[1]
    trace = read_trace(agents_trace(attrs.evolve(SHAPE, spread=0.5)))
    firsts = sorted(item.prompt for item in trace.items if item.id.endswith("turn0"))
    assert (firsts[0], firsts[-1]) == (200 + 300, 200 + 900)
    assert max(item.prompt + item.generated for item in trace.items) <= trace.header["max_context"]


@pytest.mark.parametrize("wrong", [{"agents": 0}, {"reply": 0}, {"spread": 1.0}, {"token_bytes": 0}])
def test_agents_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Agents(**wrong)


def test_changes_as_text() -> None:
    changes = parse_changes("big disk: cold-mib=5, park=disk, restore-rate.cold=900, throttle-s=2.5")
    assert changes == Changes(
        label="big disk", cold_mib=5, park="disk", throttle_s=2.5, restore_rate={"cold": 900.0}, write_rate={}
    )
    assert parse_changes("ram-mib=7").label == "ram-mib=7"


@pytest.mark.parametrize("text", ["x: ram=5", "x: ram-mib", "x: ram-mib=-1", "x: park=tape", "x: restore-rate.cold=0"])
def test_changes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_changes(text)


def test_a_rate_of_a_level_that_is_not_there_is_refused(trace: Trace) -> None:
    with pytest.raises(SettingsError, match="no level 'warm' below RAM"):
        run(trace, cold_mib=5, restore_rate={"warm": 9.0})


def test_parking_to_disk_without_a_disk_stays_in_ram(trace: Trace) -> None:
    assert Changes(park="disk").apply(SimConfig.of_trace(trace)).options.target == "ram"
    assert Changes(park="disk", cold_mib=5).apply(SimConfig.of_trace(trace)).options.target == "disk"
    small = Changes(park="auto", cold_mib=5, host_mib=64, min_free_mib=0).apply(SimConfig.of_trace(trace))
    large = Changes(park="auto", cold_mib=5, host_mib=640, min_free_mib=0).apply(SimConfig.of_trace(trace))
    assert (small.options.target, large.options.target) == ("disk", "ram")
