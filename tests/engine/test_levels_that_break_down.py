"""A level below RAM whose methods raise what they should not: requests go on, and none of them notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import slow_disk
from engine_driver import Driver, ids, join
from slow_disk import Behaviour

from strata_core.engine.report import level_infos, snapshot
from strata_core.plugins import Plugins

METHODS = (
    "entries", "find", "usage", "weigh", "cost", "put", "load", "held", "holds", "beginnings", "remove", "update",
    "expired", "reclaim", "busy", "poll", "settle",
)  # fmt: skip


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["shadow_plugin", "slow_disk"], blocked=["tiers"])


@pytest.fixture(autouse=True)
def disk() -> Iterator[None]:
    slow_disk.CONFIG.clear()
    slow_disk.CONFIG["cold"] = Behaviour()
    yield
    slow_disk.CONFIG.clear()


def fail(*arguments: Any) -> NoReturn:
    raise RuntimeError("a bug in a plugin")


def turns(engine: Driver, first: int) -> list[tuple[int, ...]]:
    """Replies of conversations that take turns on one slot, each asked twice; ``first`` makes them new ones."""
    opener = next(iter(engine.core.keeper.openers))
    replies = []
    for turn in range(2):
        for c in range(first, first + 3):
            prompt = join((opener,), ids(c, count=20), (opener,), ids(c, count=30), ids(c, turn, count=turn))
            replies.append(engine.ask(prompt, max_tokens=3).tokens)
    return replies


MODES: dict[str, dict[str, Any]] = {
    "ram and disk": dict(conversation_cache_slots=1),
    "disk only": dict(conversation_cache_disk_only=True),
}
#: A level that never finishes its writes keeps the pages of all of them, and without RAM none are to spare.
KEEPS_PAGES = ("poll", "disk only")


@pytest.mark.parametrize("backend", ["numpy"], indirect=True)
@pytest.mark.parametrize(("method", "mode"), [(a, b) for a in METHODS for b in MODES if (a, b) != KEEPS_PAGES])
def test_requests_go_on(
    driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, method: str, mode: str
) -> None:
    expected = driver(parallel=1, conversation_cache=False)
    engine = driver(parallel=1, **MODES[mode])
    level = next(level for level in engine.core.keeper.ladder.levels if level.name == "cold")
    assert turns(engine, 0) == turns(expected, 0)
    with monkeypatch.context() as broken:
        broken.setattr(level, method, fail)
        assert turns(engine, 0) == turns(expected, 0)
        assert turns(engine, 10) == turns(expected, 10)
        engine.core.working_behind()
        assert snapshot(engine.core, 0).requests_total == {"length": 18}
        assert {info.name for info in level_infos(engine.core, counting=True)} <= {"ram", "cold"}
    assert turns(engine, 10) == turns(expected, 10)
