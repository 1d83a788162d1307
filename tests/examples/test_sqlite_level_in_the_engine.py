"""The example level in an engine: conversations go down to it, come back from it, and outlive the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Completion, Request, Sampling
from strata_core.errors import LevelError, SettingsError
from strata_core.plugins import Plugins
from strata_core.settings import resolve
from strata_core.testing.tiny import tiny_llama

Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in nothing but their weights."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_llama(folder / f"{seed}.gguf", seed=seed, layers=2, context=256) for seed in (1, 2)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "conversations.db"


@pytest.fixture
def open_engine(models: list[Path], database: Path) -> Iterator[Open]:
    """Opens engines with one slot and room for one conversation in RAM; closes what is left open."""
    plugins = Plugins.load(environ={}, requested=["strata_level_sqlite"], blocked=["tiers"])
    engines: list[Engine] = []

    def make(model: int = 0, **overrides: Any) -> Engine:
        values = dict(
            model=str(models[model]), backend="numpy", page_tokens=8, parallel=1, conversation_cache_mib=16,
            conversation_cache_slots=1, conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0,
            conversation_cache_spill_on="evict", sqlite_level_path=str(database), sqlite_level_mib=16,
        )  # fmt: skip
        settings = resolve(plugins.settings(), command_line=values | overrides, environ={}, config=None)
        engines.append(Engine.open(settings, plugins))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(engine: Engine, text: str) -> np.ndarray:
    return engine.tokenizer.encode(text)


def ask(engine: Engine, ids: np.ndarray) -> Completion:
    sampling = Sampling(temperature=0)
    return engine.submit(Request(prompt=ids, sampling=sampling, max_tokens=5, ignore_eos=True)).result()


def next_turn(engine: Engine, ids: np.ndarray, reply: Completion, text: str) -> np.ndarray:
    return np.concatenate([ids, np.array(reply.tokens, np.int32), engine.tokenizer.encode(text)]).astype(np.int32)


def entries(engine: Engine) -> dict[str, int]:
    return {level.name: level.entries for level in engine.levels()}


def test_a_conversation_evicted_from_ram_is_resumed_from_the_file(open_engine: Open) -> None:
    engine, plain = open_engine(), open_engine(conversation_cache=False)
    first = prompt(engine, "the first conversation is about words and numbers")
    reply = ask(engine, first)
    ask(engine, prompt(engine, "a second one"))
    assert entries(engine) == {"ram": 1, "sqlite": 0}
    ask(engine, prompt(engine, "yet another"))
    assert entries(engine) == {"ram": 1, "sqlite": 1}
    assert engine.stats().demotions == 1
    assert engine.stats().evictions == 0
    turn = next_turn(engine, first, reply, " what is the number")
    resumed = ask(engine, turn)
    computed = len(first) + len(reply.tokens) - 1  # the last token of a reply is never fed back
    assert resumed.record.reused == {"sqlite": computed}
    assert resumed.record.cached_tokens == computed
    assert resumed.tokens == ask(plain, turn).tokens


def test_conversations_are_there_for_the_next_engine(open_engine: Open) -> None:
    engine = open_engine()
    turns = []
    for text in ("one conversation", "another of them", "the third"):
        ids = prompt(engine, text)
        turns.append(next_turn(engine, ids, ask(engine, ids), " and more"))
    engine.drain(timeout=10)
    engine.close()
    engine, plain = open_engine(), open_engine(conversation_cache=False)
    assert entries(engine) == {"ram": 0, "sqlite": 3}
    for turn in turns:
        resumed = ask(engine, turn)
        assert list(resumed.record.reused) == ["sqlite"]
        assert resumed.record.read_tokens <= len(prompt(engine, " and more")) + 1
        assert resumed.tokens == ask(plain, turn).tokens


def test_an_engine_that_ends_without_notice_loses_only_what_was_in_memory(open_engine: Open) -> None:
    engine = open_engine()
    first = prompt(engine, "the first conversation")
    turn = next_turn(engine, first, ask(engine, first), " and more")
    for text in ("another of them", "the third"):
        ask(engine, prompt(engine, text))
    grown = next_turn(engine, turn, ask(engine, turn), " still more")  # resumed from the file: the copy there stays
    engine.close()
    assert list(ask(open_engine(), grown).record.reused) == ["sqlite"]


def test_without_ram_conversations_go_straight_to_the_file(open_engine: Open) -> None:
    engine = open_engine(conversation_cache_mib=0)
    first = prompt(engine, "the first conversation")
    turn = next_turn(engine, first, ask(engine, first), " and more")
    ask(engine, prompt(engine, "a second one"))
    assert entries(engine) == {"sqlite": 1}
    assert list(ask(engine, turn).record.reused) == ["sqlite"]
    assert engine.stats().discards == 0


def test_a_model_with_other_weights_finds_nothing_and_harms_nothing(open_engine: Open) -> None:
    engine = open_engine()
    first = prompt(engine, "the first conversation")
    turn = next_turn(engine, first, ask(engine, first), " and more")
    engine.drain(timeout=10)
    engine.close()
    other = open_engine(model=1)
    assert ask(other, turn).record.cached_tokens == 0
    assert entries(other) == {"ram": 0, "sqlite": 1}
    other.close()
    assert list(ask(open_engine(), turn).record.reused) == ["sqlite"]


def test_a_damaged_block_is_read_again_instead(open_engine: Open, database: Path) -> None:
    import sqlite3

    engine = open_engine()
    first = prompt(engine, "the first conversation is about words and numbers")
    turn = next_turn(engine, first, ask(engine, first), " and more")
    engine.drain(timeout=10)
    engine.close()
    with sqlite3.connect(database) as db:
        db.execute("UPDATE blocks SET data = zeroblob(length(data)) WHERE number = 1")
    db.close()
    engine, plain = open_engine(), open_engine(conversation_cache=False)
    read_again = ask(engine, turn)
    assert read_again.record.cached_tokens == 0
    assert read_again.tokens == ask(plain, turn).tokens
    assert [reread.reason for reread in read_again.record.reread] == ["damaged"]
    assert engine.stats().restore_failures == 1
    assert entries(engine)["sqlite"] == 0


def test_the_plugin_does_nothing_unless_configured(open_engine: Open) -> None:
    assert entries(open_engine(sqlite_level_path="")) == {"ram": 0}


def test_two_engines_cannot_share_the_file(open_engine: Open) -> None:
    open_engine()
    with pytest.raises(LevelError, match="locked"):
        open_engine()


def test_a_bad_size_is_refused(open_engine: Open) -> None:
    with pytest.raises(SettingsError, match="sqlite"):
        open_engine(sqlite_level_mib="many")
