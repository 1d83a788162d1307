"""The archive and the folder of system prompts behind an engine, and what ``strata cache`` makes of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from disk_kit import ids

from strata_core.cli import main
from strata_core.engine.engine import Engine
from strata_core.engine.exchange import import_session
from strata_core.engine.requests import Completion, Request, Sampling
from strata_core.errors import SettingsError
from strata_core.plugins import Plugins
from strata_core.settings import resolve
from strata_core.store.session import SessionFile
from strata_core.testing.tiny import tiny_llama

Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", seed=3, layers=2, context=512)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def open_engine(model: Path, plugins: Plugins, cold: Path) -> Iterator[Open]:
    engines: list[Engine] = []

    def make(**overrides: Any) -> Engine:
        values = dict(
            model=str(model), backend="numpy", page_tokens=8, parallel=1, conversation_cache_mib=16,
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, restore_when="always",
            conversation_cache_cold_dir=str(cold), conversation_cache_cold_mib=64, system_prompt_cache="off",
        )  # fmt: skip
        settings = resolve(plugins.settings(), command_line=values | overrides, environ={}, config=None)
        engines.append(Engine.open(settings, plugins))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: Engine, prompt: np.ndarray) -> Completion:
    sampling = Sampling(temperature=0)
    return engine.submit(Request(prompt=prompt, sampling=sampling, max_tokens=4, ignore_eos=True)).result()


def source(reply: Completion) -> tuple[str, ...]:
    return tuple(reply.record.reused)


def prompt(engine: Engine, *turns: np.ndarray) -> np.ndarray:
    """A system prompt, user's and model's turns, each behind an opener; and one for the reply."""
    [opener] = engine.call(lambda core: core.keeper.openers)
    return np.concatenate([part for turn in turns for part in ([opener], turn)] + [[opener]]).astype(np.int32)


def text(seed: int, count: int) -> np.ndarray:
    """Ids that are letters of the tiny model's vocabulary."""
    return ids(seed, count) % 200 + 20


def settled(engine: Engine) -> Engine:
    """The same engine, once nothing is under way behind it."""
    deadline = time.monotonic() + 20
    while engine.call(lambda core: core.working_behind()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return engine


def grow(engine: Engine, turns: int) -> list[Completion]:
    """A conversation of so many turns; somebody else takes the slot after each."""
    said, replies = [text(1, 40), text(2, 20)], []
    for number in range(turns):
        replies.append(ask(engine, prompt(engine, *said)))
        said += [np.array(replies[-1].tokens, np.int32), text(10 + number, 20)]
        ask(engine, text(50 + number, 12))
        settled(engine)
    return replies


def rewrite(engine: Engine) -> np.ndarray:
    """A conversation whose client throws most of its history away. Returns what that was."""
    system, first = text(1, 40), text(2, 20)
    long = prompt(engine, system, first, text(3, 150), text(4, 30))
    ask(engine, long)
    ask(engine, prompt(engine, system, first, text(5, 30), text(6, 20)))
    ask(engine, text(7, 12))
    settled(engine)
    return long


@pytest.fixture
def cache(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run ``strata cache ARGUMENTS`` and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> str:
        env = {"STRATA_HOME": str(tmp_path / "home"), "STRATA_CONVERSATION_CACHE_COLD_DIR": str(cold)}
        result = CliRunner().invoke(main, ["--plugins", "strata_tiers", "cache", *map(str, arguments)], env=env)
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.mark.parametrize("mode", ["ids", "state"])
@pytest.mark.parametrize("target", [{}, {"conversation_cache_disk_only": "on"}])
def test_superseded_copies_are_archived_and_no_reply_changes_or_comes_from_there(
    open_engine: Open, mode: str, target: dict[str, Any]
) -> None:
    expected = [reply.tokens for reply in grow(open_engine(conversation_cache=False), 4)]
    engine = open_engine(conversation_cache_archive_mode=mode, **target)
    replies = grow(engine, 4)
    assert [reply.tokens for reply in replies] == expected
    assert all(set(source(reply)) <= {"live", "ram", "cold"} for reply in replies)
    assert all(source(reply) for reply in replies[1:])
    stats = engine.stats()
    assert (stats.archived, stats.archive_failures) == (3, 0)
    [level] = [level for level in engine.levels() if level.name == "archive"]
    assert (level.entries, level.bytes > 0) == (3, True)


def test_without_the_setting_nothing_is_archived(open_engine: Open, cold: Path) -> None:
    engine = open_engine()
    grow(engine, 3)
    assert engine.stats().superseded > 0
    assert engine.stats().archived == 0
    assert not (cold / "archive").exists()


@pytest.mark.parametrize("cold_mib", [64, 0])
def test_a_rewritten_history_is_brought_back_from_the_archive(
    open_engine: Open, cold: Path, cache: Callable[..., str], tmp_path: Path, cold_mib: int
) -> None:
    engine = open_engine(conversation_cache_archive_mode="state", conversation_cache_cold_mib=cold_mib)
    long = rewrite(engine)
    assert engine.stats().compacted
    assert ask(engine, long).record.cached_tokens < 100  # nobody is served from the archive
    engine.close()
    [found] = json.loads(cache("ls", "--archive", "--json"))
    assert (found["reason"], found["ids_only"], found["tokens"] >= len(long)) == ("compacted", False, True)
    assert "compacted" in cache("ls", "--archive")
    assert found["id"] not in (cache("ls") if cold_mib else "")
    assert "0 damaged" in cache("check", "--archive")
    cache("export", found["id"], tmp_path / "long.sess", "--archive")
    shutil.rmtree(cold)
    engine = open_engine()
    with SessionFile.open(tmp_path / "long.sess") as file:
        import_session(engine, file, "")
    reply = ask(engine, long)
    assert reply.record.cached_tokens >= len(long) - 1


def test_archived_ids_can_be_printed_and_asked_again(open_engine: Open, cache: Callable[..., str]) -> None:
    engine = open_engine(conversation_cache_archive_mode="ids")
    long = rewrite(engine)
    engine.close()
    [found] = json.loads(cache("ls", "--archive", "--json"))
    assert found["ids_only"]
    [shown] = json.loads(cache("show", found["id"][:8], "--archive", "--ids", "--json"))
    assert shown["token_ids"][: len(long)] == long.tolist()
    assert "ids only" in cache("ls", "--archive")
    cache("rm", found["id"], "--archive", "--yes")
    assert json.loads(cache("ls", "--archive", "--json")) == []
    assert "a folder of its own" in cache("ls", "--archive", "--dir", ".", code=2)


def test_an_archive_that_breaks_down_is_counted_and_costs_no_request(open_engine: Open, cold: Path) -> None:
    expected = [reply.tokens for reply in grow(open_engine(conversation_cache=False), 4)]
    engine = open_engine(conversation_cache_archive_mode="state")
    settled(engine)
    shutil.rmtree(cold / "archive")
    (cold / "archive").write_text("in the way")
    assert [reply.tokens for reply in grow(engine, 4)] == expected
    stats = engine.stats()
    assert (stats.archived, stats.archive_failures, stats.spill_failures) == (0, 3, 0)


def test_deleting_a_conversation_deletes_its_archived_copies(open_engine: Open) -> None:
    engine = open_engine(conversation_cache_archive_mode="state")
    grow(engine, 3)
    longest = max(engine.conversations(), key=lambda found: found.tokens)
    engine.delete_conversation(longest.id)
    settled(engine)
    assert [level.entries for level in engine.levels() if level.name == "archive"] == [0]


# -- system prompts -----------------------------------------------------------------------------------------------


def roots(folder: Path, **more: object) -> dict[str, Any]:
    return {"system_prompt_cache": "on", "system_prompt_cache_dir": str(folder), **more}


def begin(engine: Engine, system: int, seed: int) -> Completion:
    """A new conversation that begins with system prompt number ``system``, parked when this returns."""
    reply = ask(engine, prompt(engine, text(system, 60), text(seed, 20)))
    ask(engine, text(90 + seed, 12))
    settled(engine)
    return reply


@pytest.mark.parametrize("cold_mib", [64, 0])
def test_a_system_prompt_in_a_folder_of_its_own_outlives_all_conversations(
    open_engine: Open, cold: Path, tmp_path: Path, cold_mib: int
) -> None:
    values = roots(tmp_path / "roots", conversation_cache_cold_mib=cold_mib)
    engine = open_engine(**values)
    begin(engine, 1, 2)
    engine.close()
    shutil.rmtree(cold, ignore_errors=True)
    engine = open_engine(**values)
    reply = begin(engine, 1, 3)
    assert (source(reply), reply.record.cached_tokens) == (("system-prompt",), 56)
    expected = begin(open_engine(conversation_cache=False), 1, 3)
    assert reply.tokens == expected.tokens
    [level] = [level for level in engine.levels() if level.name == "system-prompt"]
    assert level.entries == 1


def test_what_another_level_has_as_much_of_is_taken_from_there(open_engine: Open, tmp_path: Path) -> None:
    values = roots(tmp_path / "roots", conversation_cache_disk_only="on")
    engine = open_engine(**values)
    begin(engine, 1, 2)
    engine.close()
    assert source(begin(open_engine(**values), 1, 3)) == ("cold",)


def test_system_prompts_are_reused_under_their_key_only(open_engine: Open, cold: Path, tmp_path: Path) -> None:
    def cached(key: str, *, apart: bool) -> int:
        """Of a conversation in a server with this key, after all other conversations were lost."""
        where = roots(tmp_path / "roots") if apart else {"system_prompt_cache": "on"}
        engine = open_engine(**where, system_prompt_cache_key=key)
        for level in engine.call(lambda core: core.keeper.ladder.searched):
            for entry in [e for e in engine.call(lambda core, of=level: list(of.entries())) if not e.root]:
                engine.call(lambda core, of=level, entry=entry: of.remove(entry))
        reply = begin(engine, 1, 3)
        engine.close()
        return reply.record.cached_tokens

    for apart in (True, False):
        keys = ["a", "a", "b", "b", "a", "", ""]
        assert [cached(key, apart=apart) for key in keys] == [0, 56, 0, 56, 56, 0, 56]
        shutil.rmtree(cold)


def test_old_keys_give_way_when_there_are_too_many(open_engine: Open, tmp_path: Path) -> None:
    folder = tmp_path / "roots"
    for key in ("a", "b"):
        engine = open_engine(**roots(folder, system_prompt_cache_slots=1), system_prompt_cache_key=key)
        begin(engine, 1, 2)
        engine.close()
    assert len(list((folder / "conversations").iterdir())) == 1


def test_system_prompts_have_an_age_of_their_own(open_engine: Open, tmp_path: Path) -> None:
    days = {"conversation_cache_spill_max_age_days": 3, "system_prompt_cache_max_age_days": 5}
    engine = open_engine(**roots(tmp_path / "roots", **days))
    begin(engine, 1, 2)

    def left(after_days: float) -> dict[str, int]:
        engine.call(lambda core: core.keeper.ladder.expire(time.time() + after_days * 86400))
        return {level.name: level.entries for level in settled(engine).levels() if level.name != "ram"}

    assert left(2) == {"cold": 1, "system-prompt": 1}
    assert left(4) == {"cold": 0, "system-prompt": 1}
    assert left(6) == {"cold": 0, "system-prompt": 0}


@pytest.mark.parametrize("apart", [True, False])
def test_what_only_deleted_conversations_began_with_is_deleted_too(
    open_engine: Open, tmp_path: Path, apart: bool
) -> None:
    engine = open_engine(**(roots(tmp_path / "roots") if apart else {"system_prompt_cache": "on"}))
    for seed in (2, 3):
        begin(engine, 1, seed)
    kept = {found.id for found in engine.conversations() if found.tokens == 56}
    conversations = {found.id for found in engine.conversations() if found.tokens > 70}
    assert (len(kept), len(conversations)) == (1, 2)
    engine.delete_conversation(conversations.pop())
    assert kept < {found.id for found in engine.conversations()}, "the other one begins with it"
    engine.delete_conversation(conversations.pop())
    assert not kept & {found.id for found in engine.conversations()}
    assert begin(engine, 1, 4).record.cached_tokens == 0


def test_one_folder_for_two_things_is_refused(open_engine: Open, cold: Path) -> None:
    with pytest.raises(SettingsError, match="cold and system-prompt cannot both be in"):
        open_engine(**roots(cold))
    with pytest.raises(SettingsError, match="cold and archive cannot both be in"):
        open_engine(conversation_cache_archive_mode="ids", conversation_cache_archive_dir=str(cold))
    open_engine().close()
