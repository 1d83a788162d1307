"""Sessions of the real engine: saved, restored, erased, exported, imported and verified over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from strata_core.engine import sessions as engine_sessions
from strata_core.engine.engine import Engine
from strata_core.plugins import Plugins
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder
from strata_core.settings import Settings
from strata_core.testing.server import serve
from strata_core.testing.tiny import tiny_llama

PAGE = 8
LONG = "the people of this world know what time it is and "


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": tiny_llama(folder / "one.gguf", seed=1, context=512),
        "other": tiny_llama(folder / "other.gguf", seed=2, context=512),
    }


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture
def start(models, folder):
    """Starts a real engine behind a test client; all settings may be overridden."""
    engines = []

    def start(model="one", **overrides):
        values = dict(
            model=str(models[model]), backend="numpy", kv="f32", page_tokens=PAGE, parallel=2, large_pages="off",
            conversation_cache_mib=64, conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0,
            temperature=0.0, session_save_path=folder, session_min_free_mib=0,
        )  # fmt: skip
        settings = Settings(**(values | overrides))
        plugins = Plugins.load(environ={})
        holder = EngineHolder()
        engine = holder.load(lambda progress: Engine.open(settings, plugins))
        engines.append(engine)
        client = create_app(holder, settings, plugins).test_client()
        client.engine = engine
        return client

    yield start
    for engine in engines:
        used = engine.call(lambda core: sum(slot.reserved for slot in core.slots))
        engine.close()
        assert used == 0, "a slot stayed reserved"


def complete(client, prompt, headers=None, **fields):
    reply = client.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 8, "ignore_eos": True} | fields, headers=headers
    )
    assert reply.status_code == 200, reply.json
    return reply.json


def cached(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def act(client, action, filename=None, slot=0, headers=None):
    body = {} if filename is None else {"filename": filename}
    return client.post(f"/slots/{slot}?action={action}", json=body, headers=headers)


def slot_with_tokens(client):
    return client.engine.call(lambda core: next(slot.id for slot in core.slots if slot.computed))


def pages_used(client):
    return client.engine.call(lambda core: sum(pool.used for pool in core.keeper.pools))


def test_a_conversation_outlives_its_server_in_a_file_and_goes_on_where_it_was(start, folder):
    first = start()
    whole = complete(first, LONG * 6, max_tokens=12)
    slot = slot_with_tokens(first)
    tokens = first.engine.call(lambda core: core.slots[slot].computed)
    saved = act(first, "save", "agent one.sess", slot)
    assert saved.status_code == 200, saved.json
    body = saved.json
    assert body["timings"].pop("save_ms") > 0
    assert body == {
        "id_slot": slot, "filename": "agent one.sess", "n_saved": tokens,
        "n_written": (folder / "agent one.sess").stat().st_size, "timings": {},
    }  # fmt: skip
    second = start()
    restored = act(second, "restore", "agent one.sess", 1)
    assert restored.status_code == 200, restored.json
    assert restored.json["id_slot"] == 1 and restored.json["n_restored"] == tokens
    assert restored.json["n_read"] == saved.json["n_written"] and restored.json["timings"]["restore_ms"] > 0
    text = LONG * 6 + whole["choices"][0]["text"]
    again = complete(second, text + " more", max_tokens=12)
    prompt = whole["usage"]["prompt_tokens"]
    assert cached(again) >= prompt - PAGE
    fresh = start(conversation_cache=False)
    same = complete(fresh, text + " more", max_tokens=12)
    assert again["choices"][0]["text"] == same["choices"][0]["text"]


def test_the_very_next_request_resumes_from_all_that_was_restored(start):
    first = start()
    ids = [int(i) for i in range(10, 300)]
    complete(first, ids, max_tokens=4)
    slot = slot_with_tokens(first)
    tokens = first.engine.call(lambda core: core.slots[slot].live.tokens.view().tolist())
    assert act(first, "save", "a.sess", slot).status_code == 200
    second = start()
    assert act(second, "restore", "a.sess").json["n_restored"] == len(tokens)
    assert cached(complete(second, [*tokens, 77, 78], max_tokens=2)) == len(tokens)
    listed = second.get("/v1/conversations").json["data"]
    assert listed[0]["id"] == first.get("/v1/conversations").json["data"][0]["id"]


def test_what_the_slot_held_is_parked_by_a_restore(start):
    client = start(parallel=1)
    complete(client, LONG * 4)
    assert act(client, "save", "a.sess").status_code == 200
    other = "hello world " * 20
    complete(client, other)
    assert act(client, "restore", "a.sess").status_code == 200
    assert cached(complete(client, LONG * 4 + "x", max_tokens=1)) > 0
    assert cached(complete(client, other + "more", max_tokens=1)) > 0


def test_erasing_forgets_the_slot_and_nothing_else(start):
    client = start(parallel=1)
    complete(client, LONG * 3)
    held = client.engine.call(lambda core: core.slots[0].computed)
    assert act(client, "save", "a.sess").status_code == 200
    assert act(client, "erase").json == {"id_slot": 0, "n_erased": held}
    assert act(client, "erase").json == {"id_slot": 0, "n_erased": 0}
    assert cached(complete(client, LONG * 3, max_tokens=1)) == 0
    assert act(client, "restore", "a.sess").status_code == 200


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/b", "C:x", "NUL", "nul.sess", "x" * 300, "x.", "x ", ".x", "a\0b", 7, None, "link", "A.SESS"],
)
def test_names_that_could_leave_the_folder_are_refused_and_nothing_is_opened(start, folder, tmp_path, name):
    client = start(parallel=1)
    complete(client, LONG)
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    assert act(client, "save", "a.sess").status_code == 200
    (folder / "link").symlink_to(outside)
    before = sorted(p.name for p in folder.iterdir())
    for action in ("save", "restore"):
        reply = client.post(f"/slots/0?action={action}", json={"filename": name})
        assert reply.status_code == 400 and reply.json["error"]["type"] == "invalid_request_error", reply.json
        assert reply.json["error"]["param"] == "filename"
    assert sorted(p.name for p in folder.iterdir()) == before and outside.read_text() == "untouched"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "sessions"]


def test_damaged_foreign_and_missing_files_change_nothing(start, folder):
    client = start(parallel=1)
    complete(client, LONG * 4)
    assert act(client, "save", "a.sess").status_code == 200
    good = (folder / "a.sess").read_bytes()
    flipped = bytearray(good)
    flipped[-5000] ^= 1
    (folder / "flipped.sess").write_bytes(flipped)
    (folder / "short.sess").write_bytes(good[:-1])
    (folder / "else.sess").write_bytes(b"something else entirely" * 999)
    before, pages = client.engine.call(lambda core: core.slots[0].live.conversation), pages_used(client)
    for name in ("flipped.sess", "short.sess", "else.sess"):
        reply = act(client, "restore", name)
        assert (reply.status_code, reply.json["error"]["code"]) == (400, "damaged_session"), name
        assert name in reply.json["error"]["message"]
    assert act(client, "restore", "missing.sess").status_code == 404
    assert client.engine.call(lambda core: core.slots[0].live.conversation) == before
    assert pages_used(client) == pages
    other = start("other", parallel=1)
    reply = act(other, "restore", "a.sess")
    assert (reply.status_code, reply.json["error"]["code"]) == (400, "identity_differs")
    assert "weights" in reply.json["error"]["message"]
    half = start(kv="f16", parallel=1)
    assert "kv" in act(half, "restore", "a.sess").json["error"]["message"]


def test_a_restore_that_nothing_could_resume_from_is_an_error(start):
    client = start(parallel=1)
    complete(client, LONG * 4)
    assert act(client, "save", "a.sess").status_code == 200
    tokens = act(client, "save", "a.sess").json["n_saved"]
    off = act(start(conversation_cache=False), "restore", "a.sess")
    assert off.status_code == 400 and "cache is off" in off.json["error"]["message"]
    small = act(start(max_context=tokens), "restore", "a.sess")
    assert small.json["error"]["code"] == "context_length_exceeded" and str(tokens) in small.json["error"]["message"]
    strict = act(start(conversation_cache_n_min=400), "restore", "a.sess")
    assert strict.status_code == 400 and "n-min 400" in strict.json["error"]["message"]


def test_a_busy_slot_is_a_conflict_and_an_unknown_one_not_found(start):
    client = start(parallel=1)
    complete(client, LONG)
    assert act(client, "save", "a.sess").status_code == 200
    second = client.application.test_client()
    thread = threading.Thread(target=complete, args=(second, LONG * 2), kwargs={"max_tokens": 350})
    thread.start()
    while client.engine.stats().running == 0:
        time.sleep(0.002)
    for action in ("save", "restore", "erase"):
        reply = act(client, action, "a.sess")
        assert (reply.status_code, reply.json["error"]["code"]) == (409, "conflict"), reply.json
        assert reply.json["error"]["type"] == "invalid_request_error"
    thread.join()
    for action in ("save", "restore", "erase"):
        assert act(client, action, "a.sess", slot=1).status_code == 404
    wrong = client.post("/slots/0?action=explode", json={})
    assert wrong.status_code == 400 and wrong.json["error"]["param"] == "action"


def test_requests_wait_while_their_only_slot_is_being_restored(start, monkeypatch):
    client = start(parallel=1)
    prompt = LONG * 4
    complete(client, prompt)
    assert act(client, "save", "a.sess").status_code == 200
    assert act(client, "erase").status_code == 200
    begun, go_on = threading.Event(), threading.Event()
    real = engine_sessions.from_file

    def slow(engine, stored, take, **how):
        begun.set()
        assert go_on.wait(30)
        return real(engine, stored, take, **how)

    monkeypatch.setattr(engine_sessions, "from_file", slow)
    replies, app = [], client.application
    restoring = threading.Thread(target=lambda: replies.append(act(app.test_client(), "restore", "a.sess")))
    restoring.start()
    assert begun.wait(30)
    assert act(client, "erase").status_code == 409
    asking = threading.Thread(target=lambda: replies.append(complete(app.test_client(), prompt + "x")))
    asking.start()
    while client.engine.stats().queued == 0:
        time.sleep(0.002)
    go_on.set()
    restoring.join()
    asking.join()
    assert replies[0].status_code == 200 and cached(replies[1]) > 0


def test_a_save_leaves_the_free_space_it_must_leave(start, folder):
    client = start(parallel=1, session_min_free_mib=(shutil.disk_usage("/").total >> 20) + 1)
    complete(client, LONG)
    reply = act(client, "save", "a.sess")
    assert (reply.status_code, reply.json["error"]["code"]) == (507, "insufficient_storage")
    assert "--session-min-free-mib" in reply.json["error"]["message"]
    assert list(folder.iterdir()) == []


def test_a_full_disk_leaves_the_former_file(start, folder, monkeypatch):
    client = start(parallel=1)
    complete(client, LONG)
    assert act(client, "save", "a.sess").status_code == 200
    before, pages = (folder / "a.sess").read_bytes(), pages_used(client)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    reply = act(client, "save", "a.sess")
    assert (reply.status_code, reply.json["error"]["code"]) == (507, "insufficient_storage")
    assert (folder / "a.sess").read_bytes() == before and [p.name for p in folder.iterdir()] == ["a.sess"]
    assert pages_used(client) == pages


def test_an_empty_slot_and_switched_off_sessions_say_what_is_missing(start):
    client = start()
    empty = act(client, "save", "a.sess")
    assert empty.status_code == 400 and "no conversation" in empty.json["error"]["message"]
    off = act(start(session_save_path=None), "save", "a.sess")
    assert (off.status_code, off.json["error"]["code"]) == (501, "not_supported")
    assert "--session-save-path" in off.json["error"]["message"]


def test_keys_do_not_see_each_others_sessions(start, folder):
    client = start(parallel=1, api_key=("one", "two"))
    one, two = ({"x-api-key": key} for key in ("one", "two"))
    complete(client, LONG * 2, headers=one)
    refused = act(client, "save", "a.sess", headers=two)
    assert refused.status_code == 400 and "no conversation" in refused.json["error"]["message"]
    assert act(client, "erase", headers=two).json["n_erased"] == 0
    assert act(client, "save", "a.sess", headers=one).status_code == 200
    assert act(client, "restore", "a.sess", headers=two).status_code == 404
    mine = next(p for p in folder.iterdir() if (p / "a.sess").exists())
    complete(client, "hello " * 20, headers=two)
    assert act(client, "save", "b.sess", headers=two).status_code == 200
    theirs = next(p for p in folder.iterdir() if p != mine)
    shutil.copy(mine / "a.sess", theirs / "stolen.sess")
    stolen = act(client, "restore", "stolen.sess", headers=two)
    assert stolen.json["error"]["code"] == "identity_differs" and "API key" in stolen.json["error"]["message"]


def test_an_exported_conversation_is_imported_elsewhere_and_goes_on(start):
    first = start()
    ids = list(range(20, 200))
    complete(first, ids)
    [listed] = first.get("/v1/conversations").json["data"]
    exported = first.get(f"/v1/conversations/{listed['id']}/export")
    assert exported.status_code == 200 and len(exported.data) == exported.content_length
    assert exported.headers["Content-Disposition"] == f'attachment; filename="{listed["id"]}.sess"'
    second = start()
    done = second.post("/v1/conversations/import", data=exported.data)
    assert done.status_code == 200, done.json
    assert done.json["id"] == listed["id"] and done.json["tokens"] == listed["tokens"] and done.json["place"] == "ram"
    assert cached(complete(second, [*ids, 7], max_tokens=1)) == len(ids)
    again = second.get(f"/v1/conversations/{listed['id']}/export")
    assert again.status_code == 200 and len(again.data) == again.content_length
    assert first.get("/v1/conversations/unknown/export").status_code == 404


def test_imports_are_checked_and_bounded(start):
    client = start(max_body_mib=1)
    complete(client, LONG * 8)
    [listed] = client.get("/v1/conversations").json["data"]
    data = bytearray(client.get(f"/v1/conversations/{listed['id']}/export").data)
    data[-1] ^= 1
    damaged = client.post("/v1/conversations/import", data=bytes(data))
    assert (damaged.status_code, damaged.json["error"]["code"]) == (400, "damaged_session")
    large = client.post("/v1/conversations/import", data=bytes(1 << 21))
    assert (large.status_code, large.json["error"]["code"]) == (413, "payload_too_large")
    data[-1] ^= 1
    foreign = start("other").post("/v1/conversations/import", data=bytes(data))
    assert foreign.json["error"]["code"] == "identity_differs"
    nowhere = start(conversation_cache_mib=0).post("/v1/conversations/import", data=bytes(data))
    assert (nowhere.status_code, nowhere.json["error"]["code"]) == (507, "insufficient_storage")


def test_a_parked_conversation_is_verified_and_exported_from_where_it_is(start):
    client = start(parallel=1)
    complete(client, LONG * 3)
    complete(client, "something else entirely", max_tokens=1)
    parked = next(item for item in client.get("/v1/conversations").json["data"] if item["place"] == "ram")
    pages = pages_used(client)
    report = client.post(f"/v1/conversations/{parked['id']}/verify").json
    assert report["ok"] is True
    assert [(c["place"], c["tokens"], c["good_tokens"], c["error"]) for c in report["copies"]] == [
        ("ram", parked["tokens"], parked["tokens"], None)
    ]
    exported = client.get(f"/v1/conversations/{parked['id']}/export")
    assert exported.status_code == 200 and exported.data[:8] == b"STRATSES"
    assert pages_used(client) == pages
    assert client.post("/v1/conversations/unknown/verify").status_code == 404
    [level] = client.get("/v1/levels").json["data"]
    assert level["conversations"] == 1 and level["flow"]["stored"] == 1 and level["folder"] is None


def test_a_session_survives_a_real_server_and_its_end(models, tmp_path):
    folder = tmp_path / "sessions"
    options = (
        "--model", str(models["one"]), "--parallel", "1", "--temperature", "0", "--session-save-path", str(folder),
        "--session-min-free-mib", "1",
    )  # fmt: skip

    def ask(server, path, body):
        request = urllib.request.Request(server.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    prompt = {"prompt": list(range(30, 330)), "max_tokens": 4, "ignore_eos": True}
    server = serve(*options, env={"STRATA_HOME": str(tmp_path / "one")})
    try:
        ask(server, "/v1/completions", prompt)
        saved = ask(server, "/slots/0?action=save", {"filename": "a.sess"})
        server.process.kill()  # what was answered is on the disk
        server.wait()
        server = serve(*options, env={"STRATA_HOME": str(tmp_path / "two")})  # nothing else is left of the first
        restored = ask(server, "/slots/0?action=restore", {"filename": "a.sess"})
        assert restored["n_restored"] == saved["n_saved"] >= 300
        reply = ask(server, "/v1/completions", prompt | {"prompt": [*prompt["prompt"], 5, 6]})
        assert cached(reply) == 300
        assert server.stop() == 0 and "Traceback" not in server.log, server.log
    finally:
        server.stop(10)


def test_a_save_path_that_is_a_file_is_said_at_the_start(models, tmp_path):
    from strata_core.errors import SettingsError
    from strata_core.server.preflight import check

    (tmp_path / "file").touch()
    settings = Settings(model=str(models["one"]), session_save_path=Path(tmp_path / "file"))
    with pytest.raises(SettingsError, match="is no folder"):
        check(settings, Plugins.load(environ={}))
