"""What is brought back after a restart is used: nothing but what is new is read, and replies are those without reuse.

Models with keys and values alone, with windows, with latent rows, with recurrent state, with sparse attention and an
indexer, with a layer that guesses tokens; by a session file, which the server's routes save and restore, and by the
cold level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_tiers.check import entries
from strata_tiers.exchange import export_entry

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Request, Sampling
from strata_core.plugins import Plugins
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder
from strata_core.settings import resolve
from strata_core.testing.tiny import tiny_llama
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse

PAGE = 8
REPLY = 10
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, seed=5, context=512),
    "gemma3": lambda path: tiny_family(path, architecture="gemma3", seed=5),
    "deepseek": lambda path: tiny_family(path, architecture="deepseek2", seed=5),
    "hybrid": lambda path: tiny_hybrid(path, architecture="qwen35", seed=5),
    "sparse": lambda path: tiny_sparse(path, seed=5),
    "guessing": lambda path: tiny_hybrid(path, architecture="qwen35", seed=5, further=1),
}
WITH_STATE = ("hybrid", "sparse")
Start = Callable[..., Any]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, MODELS[request.param](tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def start(model: tuple[str, Path], tmp_path: Path) -> Iterator[Start]:
    """Servers of the model with one slot, a cold level in the folder named, and session files."""
    clients: list[Any] = []

    def make(cold: str = "cold", **overrides: Any) -> Any:
        plugins = Plugins.load(environ={}, requested=["strata_tiers"], entry_points=())
        values = dict(
            model=str(model[1]), backend="numpy", page_tokens=PAGE, parallel=1, conversation_cache_mib=16,
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, restore_when="always",
            conversation_cache_cold_dir=str(tmp_path / cold), conversation_cache_cold_mib=64,
            session_save_path=str(tmp_path / "sessions"), session_min_free_mib=0, mtp=2 * (model[0] == "guessing"),
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


def turn(client: Any, seed: int, count: int) -> list[int]:
    """Ids of a turn: its opener, and what is said."""
    (opener,) = client.engine.call(lambda core: core.keeper.openers)
    return [opener, *np.random.default_rng(seed).integers(3, 384, count).tolist()]


def complete(client: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The ids of a greedy reply, and how much of the prompt was cached."""
    request = Request(
        prompt=np.array(prompt, np.int32), sampling=Sampling(temperature=0), max_tokens=REPLY, ignore_eos=True
    )
    done = client.engine.submit(request).result()
    return list(done.tokens), done.started.cached_tokens


@pytest.fixture
def fresh(start: Start) -> Callable[[list[int]], list[int]]:
    """Replies of a server that reuses nothing."""
    client = start("none", conversation_cache="off", mtp=0)
    return lambda prompt: complete(client, prompt)[0]


def by_session(start: Start, client: Any) -> Any:
    """A restart that only a session file survives."""
    saved = client.post("/slots/0?action=save", json={"filename": "turn.sess"})
    assert saved.status_code == 200, saved.json
    client.stop()
    client = start("empty")
    restored = client.post("/slots/0?action=restore", json={"filename": "turn.sess"})
    assert restored.status_code == 200, restored.json
    assert restored.json["n_restored"] == saved.json["n_saved"]
    return client


def by_cold_level(start: Start, client: Any) -> Any:
    client.stop()
    return start()


@pytest.mark.parametrize("restart", [by_session, by_cold_level])
def test_the_turn_after_a_restart_reads_what_is_new_and_can_be_made_again(
    model: tuple[str, Path], start: Start, fresh: Callable[[list[int]], list[int]], restart: Callable[..., Any]
) -> None:
    client = start()
    prompt = turn(client, 1, 45) + turn(client, 2, 60) + turn(client, 3, 2)
    reply, cached = complete(client, prompt)
    assert cached == 0 and reply == fresh(prompt)

    client = restart(start, client)
    prompt += reply + turn(client, 4, 30) + turn(client, 5, 2)
    computed = len(prompt) - 31 - 3 - 1  # the last token of the reply was sampled, not computed
    expected = fresh(prompt)
    again, cached = complete(client, prompt)
    assert again == expected and computed - PAGE <= cached <= computed

    before_the_turn = len(prompt) - 3
    for _ in range(3):
        again, cached = complete(client, prompt)
        assert again == expected and cached >= before_the_turn - PAGE


def test_a_conversation_that_comes_back_from_disk_has_its_states(model: tuple[str, Path], start: Start) -> None:
    client = start()
    prompt = turn(client, 1, 45) + turn(client, 2, 60) + turn(client, 3, 2)
    complete(client, prompt)
    [live] = client.get("/v1/conversations").json["data"]
    client.stop()
    stored = [one for one in start().get("/v1/conversations").json["data"] if one["id"] == live["id"]]
    assert len(stored) == 1 and stored[0]["place"] == "cold"
    state = {name: live[name] for name in ("states", "state_nbytes")}
    assert {name: stored[0][name] for name in state} == state
    if model[0] in (*WITH_STATE, "guessing"):
        assert state["states"] >= 2 and state["state_nbytes"] > 0
    else:
        assert state == {"states": 0, "state_nbytes": 0}


@pytest.mark.parametrize("model", WITH_STATE, indirect=True)
@pytest.mark.parametrize("how", ["session", "cold"])
def test_a_server_that_keeps_fewer_states_takes_those_it_has_room_for(
    start: Start, fresh: Callable[[list[int]], list[int]], how: str
) -> None:
    many = dict(prompt_cache=6, prompt_cache_every=16, prompt_cache_root=16)
    few = dict(prompt_cache=1, prompt_cache_every=16, prompt_cache_root=16, conversation_cache_disk_only=True)
    client = start(**many)
    prompt = turn(client, 1, 45) + turn(client, 2, 60) + turn(client, 3, 2)
    reply, _ = complete(client, prompt)
    assert client.post("/slots/0?action=save", json={"filename": "turn.sess"}).status_code == 200
    client.stop()
    client = start("empty" if how == "session" else "cold", **few)
    if how == "session":
        restored = client.post("/slots/0?action=restore", json={"filename": "turn.sess"})
        assert restored.status_code == 200, restored.json
    longer = prompt + reply + turn(client, 4, 30)
    again, cached = complete(client, longer)
    assert (again, cached) == (fresh(longer), len(prompt + reply) - 1)


@pytest.mark.parametrize("model", WITH_STATE, indirect=True)
@pytest.mark.parametrize("how", ["server", "folder"])
def test_what_is_left_of_a_damaged_conversation_can_be_exported_and_used(
    start: Start, tmp_path: Path, how: str
) -> None:
    client = start(prompt_cache_every=16)
    prompt = turn(client, 1, 45) + turn(client, 2, 60) + turn(client, 3, 2)
    reply, _ = complete(client, prompt)
    client.stop()
    [end] = (tmp_path / "cold" / "segments").glob("strata-state-*-*-*.seg")  # at the end, within a page
    data = end.read_bytes()
    end.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    client = start()
    listed = [one["id"] for one in client.get("/v1/conversations").json["data"]]
    [damaged] = [i for i in listed if not all(c["ok"] for c in verified(client, i))]
    if how == "server":
        exported = client.get(f"/v1/conversations/{damaged}/export").data
    else:
        client.stop()  # which writes what is left
        [found] = [one.entry.id for one in entries(tmp_path / "cold") if one.entry.conversation == damaged]
        export_entry(tmp_path / "cold", found, tmp_path / "left.sess")
        exported = (tmp_path / "left.sess").read_bytes()
    other = start("other")
    imported = other.post("/v1/conversations/import", data=exported)
    assert imported.status_code == 200, imported.json
    _, cached = complete(other, prompt + reply)
    assert cached == len(prompt) - 3 - (len(prompt) - 3) % PAGE


def verified(client: Any, conversation: str) -> list[dict[str, Any]]:
    report = client.post(f"/v1/conversations/{conversation}/verify")
    assert report.status_code == 200, report.json
    return list(report.json["copies"])
