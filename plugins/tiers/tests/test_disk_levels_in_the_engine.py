"""The disk levels in an engine: conversations go down, come back, outlive the engine, and replies do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_kit import files_in

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Completion, Request, Sampling
from strata_core.errors import LevelError, SettingsError
from strata_core.plugins import Plugins
from strata_core.settings import Settings, resolve
from strata_core.testing.tiny import tiny_llama

Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in nothing but their weights."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_llama(folder / f"{seed}.gguf", seed=seed, layers=2, context=512) for seed in (1, 2)]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def open_engine(models: list[Path], plugins: Plugins, cold: Path) -> Iterator[Open]:
    """Opens engines with one slot and a cold level; closes what is left open."""
    engines: list[Engine] = []

    def make(model: int = 0, **overrides: Any) -> Engine:
        values = dict(
            model=str(models[model]), backend="numpy", page_tokens=8, parallel=1, conversation_cache_mib=16,
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, restore_when="always",
            conversation_cache_cold_dir=str(cold), conversation_cache_cold_mib=64, system_prompt_cache="off",
        )  # fmt: skip
        settings = resolve(plugins.settings(), command_line=values | overrides, environ={}, config=None)
        engines.append(Engine.open(settings, plugins))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: Engine, ids: np.ndarray) -> Completion:
    sampling = Sampling(temperature=0)
    return engine.submit(Request(prompt=ids, sampling=sampling, max_tokens=6, ignore_eos=True)).result()


def turns(engine: Engine, subject: str, count: int) -> list[Completion]:
    """A conversation of so many turns, each asked with all that was said before."""
    ids, replies = engine.tokenizer.encode(f"<|im_start|>user\ntell me about {subject}<|im_end|>\n"), []
    for number in range(count):
        replies.append(ask(engine, ids))
        more = engine.tokenizer.encode(f"<|im_end|>\n<|im_start|>user\nand number {number}<|im_end|>\n")
        ids = np.concatenate([ids, np.array(replies[-1].tokens, np.int32), more]).astype(np.int32)
        ask(engine, engine.tokenizer.encode(f"somebody else asks about {number} {subject}"))
    return replies


MODES = {
    "ram": {},
    "disk": {"conversation_cache_park": "disk"},
    "disk only": {"conversation_cache_disk_only": True},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_later_turn_resumes_also_after_a_restart_and_replies_are_those_without_reuse(
    open_engine: Open, mode: dict[str, Any]
) -> None:
    plain = open_engine(conversation_cache=False)
    expected = [reply.tokens for reply in turns(plain, "rivers", 4)]
    engine = open_engine(**mode)
    first = turns(engine, "rivers", 2)
    engine.close()
    engine = open_engine(**mode)
    after = turns(engine, "rivers", 4)
    assert [reply.tokens for reply in (*first, *after)] == expected[:2] + expected
    assert all(reply.record.cached_tokens > 0 for reply in (first[1], *after))
    assert after[0].record.reused.get("cold") or after[1].record.reused.get("cold")


def test_another_model_in_the_same_folder_reuses_nothing_and_harms_nothing(open_engine: Open, cold: Path) -> None:
    engine = open_engine()
    turns(engine, "rivers", 2)
    engine.close()
    before = files_in(cold)
    engine = open_engine(model=1)
    replies = turns(engine, "rivers", 1)
    assert replies[0].record.cached_tokens == 0
    engine.close()
    assert set(before) <= set(files_in(cold))
    engine = open_engine()
    assert turns(engine, "rivers", 1)[0].record.cached_tokens > 0


def test_a_flipped_byte_is_read_again_in_the_same_request(open_engine: Open, cold: Path) -> None:
    plain = open_engine(conversation_cache=False)
    expected = [reply.tokens for reply in turns(plain, "rivers", 3)]
    engine = open_engine()
    turns(engine, "rivers", 3)
    engine.close()
    for path in (cold / "segments").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 8]))
    engine = open_engine()
    assert [reply.tokens for reply in turns(engine, "rivers", 3)] == expected
    assert list((cold / "quarantine").iterdir())


def test_a_damaged_end_costs_the_same_request_no_more_than_the_end(open_engine: Open, cold: Path) -> None:
    def start(path: Path) -> int:
        return int(path.name.split("-")[3].split(".")[0])

    plain = open_engine(conversation_cache=False)
    prompt = plain.tokenizer.encode("<|im_start|>user\ntell me about rivers<|im_end|>\n" * 4)
    engine = open_engine()
    longer = np.concatenate([prompt, np.array(ask(engine, prompt).tokens, np.int32)])
    engine.drain(10)
    engine.close()
    last = max((cold / "segments").iterdir(), key=start)
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 8]))
    reply = ask(open_engine(), longer)
    assert reply.tokens == ask(plain, longer).tokens
    assert reply.record.reused == {"cold": start(last)}
    assert [(reread.tokens, reread.reason) for reread in reply.record.reread] == [(5, "damaged")]


def test_the_second_engine_on_a_folder_is_told_so(open_engine: Open) -> None:
    open_engine()
    with pytest.raises(LevelError, match=r"in use by another process .*; choose another with --conversation-cache"):
        open_engine()


def test_both_levels_in_one_folder_are_refused(open_engine: Open, cold: Path) -> None:
    with pytest.raises(SettingsError, match="cannot both be in"):
        open_engine(conversation_cache_warm_dir=str(cold), conversation_cache_warm_mib=16)


def test_levels_are_those_that_are_configured(open_engine: Open, tmp_path: Path, plugins: Plugins) -> None:
    def names(engine: Engine) -> list[str]:
        found = [level.name for level in engine.levels()]
        engine.close()
        return found

    assert names(open_engine()) == ["ram", "cold"]
    assert names(open_engine(conversation_cache_cold_mib=0)) == ["ram"]
    warm = dict(conversation_cache_warm_dir=str(tmp_path / "warm"), conversation_cache_warm_mib="16MiB")
    assert names(open_engine(**warm)) == ["ram", "warm", "cold"]
    assert names(open_engine(conversation_cache_warm_mib=16)) == ["ram", "cold"]


def test_settings_made_without_the_plugin_ask_for_no_disk(models: list[Path], plugins: Plugins) -> None:
    engine = Engine.open(Settings(model=str(models[0]), backend="numpy", conversation_cache_mib=16), plugins)
    assert [level.name for level in engine.levels()] == ["ram"]
    engine.close()


def test_the_cold_folder_is_in_the_cache_home_and_the_aliases_are_the_same_settings(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from strata_tiers.factory import cold_folder
    from strata_tiers.settings import DiskSettings

    monkeypatch.setenv("STRATA_HOME", str(tmp_path))

    def resolved(**given: object) -> DiskSettings:
        return resolve(plugins.settings(), command_line=given, environ={}, config=None).plugin(DiskSettings)

    assert cold_folder(resolved()) == tmp_path / "cache" / "conversations"
    aliases = resolved(conversation_cache_spill_dir="/x", conversation_cache_disk_mib="2GiB")
    assert cold_folder(aliases) == Path("/x")
    assert aliases.conversation_cache_cold_mib == 2048
