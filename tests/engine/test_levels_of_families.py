"""Conversations of every kind of model go to every level and come back; what a newer copy contains is superseded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slow_disk
from engine_driver import Driver, ids, join
from slow_disk import Behaviour

from strata_core.plugins import Plugins

Make = Callable[..., Driver]
LATE = 10_000


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["shadow_plugin", "slow_disk"], blocked=["tiers"])


@pytest.fixture
def cold() -> Iterator[Behaviour]:
    slow_disk.CONFIG.clear()
    slow_disk.CONFIG["cold"] = Behaviour()
    yield slow_disk.CONFIG["cold"]
    slow_disk.CONFIG.clear()


@pytest.mark.parametrize("mode", [dict(), dict(conversation_cache_slots=1), dict(conversation_cache_park="disk"),
                                  dict(conversation_cache_disk_only=True)], ids=["ram", "evicted", "disk", "only"])
@pytest.mark.parametrize(("kind", "delay"), [("window", 0), ("hybrid", 0), ("hybrid", LATE), ("sparse", 0)])
def test_conversations_that_take_turns_resume_from_every_level(
    driver: Make, tiny_models: dict[str, Path], cold: Behaviour, mode: dict[str, Any], kind: str, delay: int
) -> None:
    cold.delay = delay
    common: dict[str, Any] = dict(model=str(tiny_models[kind]), parallel=1, prompt_cache_root=16)
    plain = driver(**common, conversation_cache=False)
    engine = driver(**common, restore_when="always", **mode)
    histories = [ids(c, count=60) for c in range(3)]
    for turn in range(3):
        for c, history in enumerate(histories):
            reply = engine.ask(history, max_tokens=3)
            assert reply.tokens == plain.ask(history, max_tokens=3).tokens
            if turn:
                assert reply.record.read_tokens == 11, "ten new tokens and the one that was never fed back"
                assert reply.record.reread == ()
            histories[c] = join(history, reply.tokens, ids(c, turn, count=10))
    assert engine.core.keeper.discards == 0
    if delay:
        return  # nothing was ever written
    ladder = engine.core.keeper.ladder
    copies = [entry.conversation for level in ladder.below for entry in level.entries() if not entry.root]
    assert len(copies) == len(set(copies)), "older copies are superseded: the newer ones hold their states"
    assert ladder.counts["superseded"] > 0
