"""Session files, exports and checks of conversations that are on disk levels, through the server's routes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from disk_kit import files_in

from strata_core.cli import main
from strata_core.engine.engine import Engine
from strata_core.plugins import Plugins
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder
from strata_core.settings import resolve
from strata_core.testing.tiny import tiny_llama

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", seed=5, context=512)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Opens engines that park to a cold level only, each behind a test client with a ``stop()``."""
    clients: list[Any] = []

    def make(**overrides: Any) -> Any:
        plugins = Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())
        values = dict(
            model=str(model), backend="numpy", page_tokens=8, parallel=1, conversation_cache_disk_only="on",
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, restore_when="always",
            conversation_cache_cold_dir=str(tmp_path / "cold"), conversation_cache_cold_mib=64,
            system_prompt_cache="off", session_save_path=str(tmp_path / "sessions"), session_min_free_mib=0,
            temperature=0,
        )  # fmt: skip
        settings = resolve(plugins.settings(), command_line=values | overrides, environ={}, config=None)
        holder = EngineHolder()
        engine = holder.load(lambda progress: Engine.open(settings, plugins))
        client: Any = create_app(holder, settings, plugins).test_client()
        client.engine, client.stop = engine, lambda: holder.shut_down(10)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.stop()


def complete(client: Any, prompt: list[int]) -> int:
    """Ask for a token; returns how much of the prompt was cached."""
    reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
    assert reply.status_code == 200, reply.json
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def stored(client: Any, prompt: list[int]) -> str:
    """Have a conversation written to the cold level; returns its id."""
    complete(client, prompt)
    conversation = str(client.get("/v1/conversations").json["data"][0]["id"])
    complete(client, [9] * 20)
    client.engine.call(lambda core: core.keeper.ladder.flush())
    client.engine.call(lambda core: core.keeper.poll())
    return conversation


def test_a_conversation_on_disk_is_verified_exported_and_reported(start: Start, tmp_path: Path) -> None:
    client = start()
    ids = list(range(20, 220))
    conversation = stored(client, ids)
    report = client.post(f"/v1/conversations/{conversation}/verify").json
    assert report["ok"] and [(copy["place"], copy["ok"]) for copy in report["copies"]] == [("cold", True)]
    [cold] = [level for level in client.get("/v1/levels").json["data"] if level["name"] == "cold"]
    assert cold["folder"] == str(tmp_path / "cold") and cold["conversations"] >= 1 and cold["bytes"] > 0
    assert cold["flow"]["stored"] >= 1 and cold["flow"]["stored_bytes"] > 0 and cold["flow"]["failed"] == 0
    exported = client.get(f"/v1/conversations/{conversation}/export").data
    imported = start(conversation_cache_cold_dir=str(tmp_path / "else")).post("/v1/conversations/import", data=exported)
    assert imported.json["id"] == conversation and imported.json["place"] == "cold"
    assert complete(client, [*ids, 5]) == 200


def test_verifying_finds_damage_and_puts_it_out_of_reach(start: Start, tmp_path: Path) -> None:
    client = start()
    conversation = stored(client, list(range(20, 220)))
    largest = max(files_in(tmp_path / "cold" / "segments"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    report = client.post(f"/v1/conversations/{conversation}/verify").json
    assert not report["ok"]
    [copy] = report["copies"]
    assert not copy["ok"] and largest.name in copy["error"] and copy["good_tokens"] < copy["tokens"]
    assert not largest.exists()
    again = client.post(f"/v1/conversations/{conversation}/verify")
    assert again.status_code == 404 or again.json["ok"]


def test_what_the_server_exports_and_what_the_command_line_exports_are_interchangeable(
    start: Start, tmp_path: Path
) -> None:
    client = start()
    ids = list(range(20, 220))
    conversation = stored(client, ids)
    client.stop()

    def cache(*arguments: object) -> str:
        env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("STRATA_")}
        command = ["--plugins", "strata_tiers", "cache", *map(str, arguments)]
        result = CliRunner().invoke(main, command, env=env | {"STRATA_HOME": str(tmp_path)}, prog_name="strata")
        assert result.exit_code == 0, result.output
        return result.stdout

    target = tmp_path / "sessions" / "moved.sess"
    target.parent.mkdir(exist_ok=True)
    cache("export", conversation, target, "--dir", tmp_path / "cold")
    second = start(conversation_cache_cold_dir=str(tmp_path / "empty"))
    restored = second.post("/slots/0?action=restore", json={"filename": "moved.sess"})
    assert restored.status_code == 200, restored.json
    assert second.post("/slots/0?action=save", json={"filename": "saved.sess"}).status_code == 200
    assert complete(second, [*ids, 5]) == 200
    second.stop()
    cache("import", tmp_path / "sessions" / "saved.sess", "--dir", tmp_path / "third")
    [one] = json.loads(cache("ls", "--json", "--dir", tmp_path / "third"))
    assert one["conversation"] == conversation
    assert complete(start(conversation_cache_cold_dir=str(tmp_path / "third")), [*ids, 5, 6]) >= 200
