"""A trace that a real engine recorded, replayed with the same settings, comes to what the engine counted: exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import Chat, ask, counted, ids, record, turn

from strata_core.engine.engine import Engine
from strata_core.plugins import Plugins
from strata_core.simulate.config import Changes, SimConfig
from strata_core.simulate.outcome import Outcome
from strata_core.simulate.replay import Replay
from strata_core.simulate.trace import Trace, read_trace
from strata_core.testing.tiny import tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_llama(path, seed=7, layers=2, width=64, heads=4, kv_heads=2, context=1024)
    return path


def taking_turns(engine: Engine) -> None:
    """Nine conversations with one system prompt, more than RAM holds; some branch, repeat, and leave no trace."""
    system = turn(1, count=60)
    chats = [Chat(engine, number, system) for number in range(10, 19)]
    for round_number in range(4):
        for number, chat in enumerate(chats):
            if (number + round_number) % 4 != 3:
                chat.say(70 + 13 * number)
    ask(engine, chats[2].history[:133])  # goes back within a page
    ask(engine, chats[3].history[: len(chats[3].history) - 20])
    ask(engine, chats[3].history[: len(chats[3].history) - 20])  # the same again
    ask(engine, ids(99, count=50), cache=False)
    Chat(engine, 50, system).say(40, tenant="someone")
    Chat(engine, 50, system).say(40, tenant="someone")
    # A client that rewrites its history behind the first message.
    rewriting = Chat(engine, 70, system)
    for _ in range(3):
        rewriting.say(90)
    kept = 61 + 1 + 90 + 1
    rewriting.history = np.concatenate([rewriting.history[:kept], ids(71, count=30)])
    for _ in range(3):
        rewriting.say(60)
        chats[0].say(20)
        chats[1].say(20)
        chats[4].say(20)


def load(path: Path) -> Trace:
    with path.open() as lines:
        return read_trace(lines)


def replayed(trace: Trace, **changes: Any) -> Outcome:
    """One client sent all requests, each after the reply to the one before: so they come in the replay."""
    return Replay(trace, Changes(arrivals="order", **changes).apply(SimConfig.of_trace(trace))).run()


def test_hits_reading_evictions_and_discards_are_those_of_the_engine(model: Path, tmp_path: Path) -> None:
    real = record(model, tmp_path / "trace", taking_turns)
    trace = load(tmp_path / "trace")
    assert counted(replayed(trace)) == real
    # What it is about really happened.
    assert real["evictions"] > 5
    assert real["superseded"] and real["compacted"]
    assert real["reused"]["ram"] > 1000
    assert real["reread"]["evicted: budget"] > 1000


def test_without_room_in_ram_every_switch_is_the_discard_it_was(model: Path, tmp_path: Path) -> None:
    real = record(model, tmp_path / "trace", taking_turns, conversation_cache_mib=0)
    trace = load(tmp_path / "trace")
    assert counted(replayed(trace)) == real
    assert real["discards"] > 20


def test_what_other_budgets_come_to_is_what_an_engine_with_them_counts(model: Path, tmp_path: Path) -> None:
    record(model, tmp_path / "small", taking_turns, conversation_cache_slots=2)
    real = record(model, tmp_path / "large", taking_turns, conversation_cache_mib=8, parallel=3)
    trace = load(tmp_path / "small")
    assert counted(replayed(trace, ram_mib=8, ram_slots=64, parallel=3)) == real


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"conversation_cache_park": "disk"},
        {"conversation_cache_slots": 2, "conversation_cache_spill_on": "evict"},
    ],
)
def test_with_conversations_on_disk_it_is_the_same(
    model: Path, tmp_path: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "plugins/tiers")
    plugins = Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())
    disk = {"conversation_cache_cold_dir": str(tmp_path / "cold"), "conversation_cache_cold_mib": 64}
    real = record(model, tmp_path / "trace", taking_turns, plugins, **disk, **mode)
    simulated = counted(replayed(load(tmp_path / "trace")))
    # How many states are written before a newer one replaces them depends on how fast this machine's disk is.
    assert abs(simulated.pop("spilled") - real.pop("spilled")) <= 3
    assert real["reused"]["cold"] > 1000
    # So does, now and then, which of two places with the same tokens a turn resumes from.
    for counts in (simulated, real):
        counts["reused"] = sum(counts["reused"].values())
    for name in ("reused", "read"):
        assert simulated.pop(name) == pytest.approx(real.pop(name), abs=64)
    assert simulated == real
