"""The engine with its thread, as a library user or the server sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, ids, join

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Failed, Request, Sampling, Started
from strata_core.errors import (
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    Overloaded,
    SettingsError,
)
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings


def options(tiny_model: Path, **overrides: Any) -> Settings:
    values: dict[str, Any] = dict(
        model=str(tiny_model), backend="numpy", page_tokens=8, parallel=2, conversation_cache_mib=8,
        conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, queue=3, max_context=256,
    )  # fmt: skip
    return Settings(**(values | overrides))


@pytest.fixture
def engine(tiny_model: Path, plugins: Plugins) -> Iterator[Engine]:
    with Engine.open(options(tiny_model), plugins) as engine:
        yield engine


def request(seed: int, count: int = 20, **fields: Any) -> Request:
    usual = {"sampling": GREEDY, "ignore_eos": True, "max_tokens": 4}
    return Request(prompt=ids(seed, count=count), **(usual | fields))


def test_many_threads_each_get_their_own_reply(engine: Engine) -> None:
    expected = {seed: engine.submit(request(seed)).result().tokens for seed in range(4)}
    wrong: list[int] = []

    def client(seed: int) -> None:
        for _ in range(5):
            while True:
                try:
                    handle = engine.submit(request(seed))
                    break
                except Overloaded:
                    time.sleep(0.01)
            if handle.result().tokens != expected[seed]:
                wrong.append(seed)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = engine.stats()
    assert stats.requests_total == {"length": 44}
    assert stats.queued == stats.running == 0


@pytest.mark.parametrize("names", [(), ("one",), ("one", "two", "three")])
def test_a_model_has_each_of_its_names_once(tiny_model: Path, plugins: Plugins, names: tuple[str, ...]) -> None:
    with Engine.open(options(tiny_model, alias=names), plugins) as engine:
        assert (engine.name, *engine.aliases) == (names or (tiny_model.stem,))


def test_the_end_of_a_request_is_counted_when_it_is_seen(engine: Engine) -> None:
    for count in range(1, 20):
        handle = engine.submit(request(count))
        handle.result()
        assert engine.stats().requests_total["length"] == count
        assert engine.record(handle.id).generated_tokens == 4


def test_a_full_queue_refuses_and_says_when_to_come_back(engine: Engine) -> None:
    handles = [engine.submit(request(seed, max_tokens=100)) for seed in range(5)]
    with pytest.raises(Overloaded) as error:
        engine.submit(request(9))
    assert error.value.retry_after >= 1
    for handle in handles:
        handle.cancel()
    for handle in handles:
        with pytest.raises(Cancelled):
            handle.result()
    assert engine.submit(request(9)).result().reason == "length"


def test_wrong_requests_are_refused_with_their_numbers(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"257 .* 256"):
        engine.submit(request(1, count=257, max_tokens=None))
    with pytest.raises(ContextLengthExceeded, match=r"250 \+ 7 = 257"):
        engine.submit(request(1, count=250, max_tokens=7))
    assert engine.submit(request(1, count=250, max_tokens=6)).result().reason == "length"
    with pytest.raises(InvalidRequest, match="empty"):
        engine.submit(Request(prompt=np.zeros(0, np.int32)))
    with pytest.raises(InvalidRequest, match="384"):
        engine.submit(Request(prompt=np.array([384], np.int32)))
    with pytest.raises(InvalidRequest, match="-1"):
        engine.submit(Request(prompt=np.array([-1], np.int32)))
    with pytest.raises(InvalidRequest, match="999"):
        engine.submit(request(1, sampling=Sampling(logit_bias={999: 1.0})))


def test_cancelling_wakes_the_engine(engine: Engine) -> None:
    running = [engine.submit(request(seed, max_tokens=200)) for seed in (1, 2)]
    waiting = engine.submit(request(3))
    waiting.cancel()
    last = list(waiting.events())[-1]
    assert isinstance(last, Failed)
    for handle in running:
        handle.cancel()


def test_conversations_are_listed_pinned_and_deleted(engine: Engine) -> None:
    engine.submit(request(1)).result()
    (info,) = engine.conversations()
    assert (info.place, info.tokens, info.pinned) == ("slot 0", 23, False)
    engine.pin_conversation(info.id, True)
    assert engine.conversations()[0].pinned
    engine.delete_conversation(info.id)
    assert engine.conversations() == []
    for call in (lambda: engine.delete_conversation("x"), lambda: engine.pin_conversation("x", True)):
        with pytest.raises(NotFound):
            call()
    assert engine.submit(request(1)).result().started.cached_tokens == 0


def test_draining_ends_running_requests_and_refuses_new_ones(tiny_model: Path, plugins: Plugins) -> None:
    with Engine.open(options(tiny_model), plugins) as engine:
        slow = engine.submit(request(2, max_tokens=200))
        assert isinstance(slow.next_event(), Started)
        engine.drain(0.01)
        with pytest.raises(Overloaded, match="shutting down"):
            engine.submit(request(3))
        with pytest.raises(Overloaded):
            slow.result()
        assert {c.place for c in engine.conversations()} == {"ram"}


def test_closing_ends_everything(tiny_model: Path, plugins: Plugins) -> None:
    engine = Engine.open(options(tiny_model), plugins)
    handles = [engine.submit(request(seed, max_tokens=200)) for seed in range(5)]
    engine.close()
    engine.close()
    for handle in handles:
        last = list(handle.events())[-1]
        assert isinstance(last, Failed)
    with pytest.raises(Overloaded):
        engine.submit(request(1))
    assert not any(t.name == "strata-engine" for t in threading.enumerate())


def test_a_context_that_does_not_fit_or_exceeds_the_model_is_refused_with_the_arithmetic(
    tiny_model: Path, plugins: Plugins
) -> None:
    with pytest.raises(SettingsError, match="513"):
        Engine.open(options(tiny_model, max_context=513), plugins)
    with pytest.raises(OutOfMemory, match="MiB"):
        Engine.open(options(tiny_model, conversation_cache_min_free_mib=10**7), plugins)


def test_a_turn_after_an_idle_time_still_resumes(engine: Engine) -> None:
    first = engine.submit(request(1)).result()
    time.sleep(0.2)
    prompt = join(ids(1, count=20), first.tokens, ids(2, count=3))
    reply = engine.submit(Request(prompt=prompt, sampling=GREEDY, max_tokens=2)).result()
    assert reply.started.cached_tokens == 23


def test_a_conversation_is_pinned_and_deleted_for_its_own_tenant_only(engine: Engine) -> None:
    engine.submit(request(1, tenant="a")).result()
    (info,) = engine.conversations()
    with pytest.raises(NotFound):
        engine.pin_conversation(info.id, True, "b")
    with pytest.raises(NotFound):
        engine.delete_conversation(info.id, "b")
    engine.delete_conversation(info.id, "a")
    assert engine.conversations() == []


def test_slots_and_conversations_name_whose_they_are(engine: Engine) -> None:
    for seed, tenant in ((1, "a"), (2, "b")):
        engine.submit(request(seed, tenant=tenant)).result()
    assert sorted(slot.tenant for slot in engine.slots()) == ["a", "b"]
    assert sorted(info.tenant for info in engine.conversations()) == ["a", "b"]
