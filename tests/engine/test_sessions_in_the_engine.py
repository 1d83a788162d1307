"""Session files and the engine's pages: in host memory and on a device, and where there is too little of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, ids, join

from strata_core.conversations.placement import Action, Verdict
from strata_core.engine import exchange, transfer
from strata_core.engine.engine import Engine
from strata_core.engine.requests import Completion, Request
from strata_core.engine.sessions import erase_slot, restore_slot, save_slot
from strata_core.errors import LevelError, OutOfMemory, Overloaded, SessionFileError
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings
from strata_core.store.session import SessionFile

Open = Callable[..., Engine]


@pytest.fixture
def open_engine(tiny_model: Path, plugins: Plugins, backend: str) -> Iterator[Open]:
    made: list[Engine] = []

    def make(**overrides: Any) -> Engine:
        values: dict[str, Any] = dict(
            model=str(tiny_model), backend=backend, kv="f32", page_tokens=8, parallel=1, conversation_cache_mib=64,
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, large_pages="off",
        )  # fmt: skip
        made.append(Engine.open(Settings(**(values | overrides)), plugins))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: Engine, prompt: np.ndarray, max_tokens: int = 4) -> Completion:
    request = Request(prompt=prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)
    return engine.submit(request).result()


def pages(engine: Engine) -> int:
    return engine.call(lambda core: sum(pool.used for pool in core.keeper.pools))


def computed(engine: Engine) -> np.ndarray:
    return engine.call(lambda core: core.slots[0].live.tokens.view().copy())


def test_pages_go_through_a_file_and_come_back_the_same(open_engine: Open, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 40_000)  # several windows for this small model
    engine, path = open_engine(), tmp_path / "a.sess"
    first = ask(engine, ids(1, count=201), 6)
    tokens, used = computed(engine), pages(engine)
    saved = save_slot(engine, 0, path, "", 0)
    assert (saved.tokens, saved.nbytes, pages(engine)) == (len(tokens), path.stat().st_size, used)
    assert erase_slot(engine, 0, "") == len(tokens) and pages(engine) == 0
    assert restore_slot(engine, 0, path, "").tokens == len(tokens)
    assert pages(engine) == used
    prompt = join(tokens, ids(2, count=9))
    again = ask(engine, prompt, 6)
    assert again.record.cached_tokens == len(tokens)
    plain = ask(open_engine(conversation_cache=False), prompt, 6)
    assert again.tokens == plain.tokens and first.tokens


def test_where_the_pools_cannot_hold_both_the_slot_is_given_up_for_a_sound_file_only(
    open_engine: Open, tmp_path: Path
) -> None:
    engine, path = open_engine(conversation_cache_mib=0), tmp_path / "a.sess"
    ask(engine, ids(1, count=300))
    tokens = computed(engine)
    save_slot(engine, 0, path, "", 0)
    erase_slot(engine, 0, "")
    ask(engine, ids(2, count=300))
    other = computed(engine)

    def narrow(core: Any) -> None:
        for pool in core.keeper.pools:
            pool.max_pages = pool.used + 10

    engine.call(narrow)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(SessionFileError):
        restore_slot(engine, 0, path, "")
    assert np.array_equal(computed(engine), other)
    path.write_bytes(sound)
    restore_slot(engine, 0, path, "")
    assert np.array_equal(computed(engine), tokens)
    erase_slot(engine, 0, "")
    engine.call(lambda core: [setattr(pool, "max_pages", 5) for pool in core.keeper.pools])
    with pytest.raises(OutOfMemory):
        restore_slot(engine, 0, path, "")
    assert engine.call(lambda core: core.slots[0].free) and pages(engine) == 0


def test_the_rule_for_all_placements_may_refuse_both_directions(open_engine: Open, tmp_path: Path) -> None:
    engine, path = open_engine(), tmp_path / "a.sess"
    ask(engine, ids(1, count=50))
    save_slot(engine, 0, path, "", 0)
    tokens = computed(engine)
    asked: list[str] = []

    def refuse(kind: str, need: int, available: int | None) -> Verdict:
        asked.append(kind)
        return Verdict(Action.REFUSE, "no room today")

    def install(core: Any) -> None:
        core.keeper.parking.ask = core.keeper.restorer._ask = refuse

    engine.call(install)
    for act in (lambda: save_slot(engine, 0, path, "", 0), lambda: restore_slot(engine, 0, path, "")):
        with pytest.raises(Overloaded, match="no room today"):
            act()
    assert asked == ["save", "restore"]
    assert np.array_equal(computed(engine), tokens)
    with SessionFile.open(path) as file, pytest.raises(Overloaded, match="no room today"):
        exchange.import_session(engine, file, "")


def test_an_engine_that_closes_waits_for_a_save_that_is_under_way(open_engine: Open, tmp_path: Path) -> None:
    import threading

    engine = open_engine()
    ask(engine, ids(1, count=50))
    entered, leave, order = threading.Event(), threading.Event(), []

    def save() -> None:
        with engine.working():
            entered.set()
            leave.wait(30)
            order.append("saved")

    def close() -> None:
        engine.close()
        order.append("closed")

    threads = [threading.Thread(target=save), threading.Thread(target=close)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert order == []
    leave.set()
    for thread in threads:
        thread.join(30)
    assert order == ["saved", "closed"]
    with pytest.raises(Overloaded):
        save_slot(engine, 0, tmp_path / "late.sess", "", 0)


def test_verifying_tells_of_a_level_that_cannot_be_read(open_engine: Open, monkeypatch: Any) -> None:
    engine = open_engine()
    ask(engine, ids(1, count=50))
    conversation = engine.conversations()[0].id
    ask(engine, ids(2, count=50))
    [sound] = exchange.verify(engine, conversation, "")
    assert sound.ok and sound.place == "ram" and sound.good_tokens == sound.tokens > 50
    ram = engine.call(lambda core: core.keeper.ladder.ram)
    failures = engine.stats().restore_failures

    def broken(entry: Any, tokens: int, sink: Any) -> None:
        raise LevelError("the medium is gone")

    monkeypatch.setattr(ram, "load", broken)
    [report] = exchange.verify(engine, conversation, "")
    assert not report.ok and report.error == "the medium is gone" and report.good_tokens == 0
    assert engine.call(lambda core: core.keeper.restore_failures) == failures + 1
