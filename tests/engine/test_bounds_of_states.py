"""However requests come, a conversation keeps no more states than it may, and what it keeps can be brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import slow_disk
from engine_driver import Driver, ids, join
from slow_disk import Behaviour

from strata_core.engine.plan import plan_memory
from strata_core.errors import OutOfMemory
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings

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


def kept(engine: Driver) -> list[int]:
    """How many states each live conversation has."""
    return [len(slot.live.positions or ()) for slot in engine.core.slots if slot.live is not None]


def test_naming_another_prefix_in_every_turn_keeps_no_more_states(hybrid: Make) -> None:
    engine = hybrid(prompt_cache=2, parallel=1, conversation_cache_mib=0)
    prompt = ids(1, count=40)
    for turn in range(6):
        reply = engine.ask(prompt, prefix=len(prompt) - 8)
        assert reply.record.status == "length"
        assert max(kept(engine)) <= 3, "two, and the one at the end"
        prompt = join(prompt, reply.tokens, ids(turn, count=30))


def test_without_kept_states_there_is_the_one_at_the_end_only(hybrid: Make) -> None:
    engine = hybrid(prompt_cache=0, parallel=1, conversation_cache_mib=0)
    opener = (min(engine.core.keeper.openers),)
    first = engine.ask(join(opener, ids(1, count=20)), max_tokens=4)  # 24 tokens are computed: the root's position
    prompt = join(opener, ids(1, count=20), first.tokens[:3], opener, ids(2, count=20))
    reply = engine.ask(prompt)
    assert (reply.record.status, reply.started.cached_tokens) == ("length", 24)
    assert kept(engine) == [1]


def test_a_state_that_another_conversation_came_from_outlasts_those_that_none_did(hybrid: Make) -> None:
    engine = hybrid(prompt_cache=3, prompt_cache_every=16, prompt_cache_root=2048)
    prompt = ids(1, count=70)
    reply = engine.ask(prompt)
    [live] = [slot.live for slot in engine.core.slots if slot.live is not None]
    assert live.positions is not None
    assert live.positions[:3] == (32, 48, 64)
    assert engine.ask(join(prompt[:40], ids(2, count=9))).started.cached_tokens == 32
    engine.ask(join(prompt, reply.tokens, ids(3, count=4)))
    assert live.positions[:2] == (32, 64)


def test_what_comes_back_without_its_state_is_read_again(
    hybrid: Make, cold: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hybrid(parallel=1, conversation_cache_disk_only=True)
    prompt = ids(1, count=60)
    first = engine.ask(prompt)
    engine.ask(ids(2, count=60))
    [level] = engine.core.keeper.ladder.below
    find = level.find
    monkeypatch.setattr(
        level, "find", lambda *asked: [(attrs.evolve(entry, states=None), shared) for entry, shared in find(*asked)]
    )
    longer = join(prompt, first.tokens, ids(3, count=9))
    reply = engine.ask(longer)
    assert reply.started.cached_tokens == 0
    assert engine.core.keeper.restore_failures == 1
    assert reply.tokens == hybrid(conversation_cache=False).ask(longer).tokens


def test_a_reply_that_is_made_again_takes_the_slot_it_had(hybrid: Make) -> None:
    engine = hybrid(parallel=3)
    prompt, other = ids(1, count=60), ids(2, count=40)
    said = engine.ask(other).tokens
    for _ in range(4):
        engine.ask(prompt)
    assert len(kept(engine)) == 2
    assert engine.ask(join(other, said, ids(3, count=5))).started.source == "live"


def test_a_plan_that_states_leave_no_room_for_says_so() -> None:
    settings = Settings(parallel=4, prompt_cache=6, conversation_cache_min_free_mib=0)
    sizes = dict(block_bytes=1 << 20, model_context=4096, available=1 << 30, host_available=1 << 30, host_memory=True)
    with pytest.raises(OutOfMemory, match=r"0 MiB .* and 2400 MiB for 8 recurrent states each; .*prompt_cache"):
        plan_memory(settings, **sizes, state_bytes=75 << 20)
