"""Who may use the server, and who shares whose cache."""

from __future__ import annotations

import hmac

import pytest

from strata_core.cli.app import split_repeated
from strata_core.engine.stats import SlotInfo
from strata_core.errors import SettingsError
from strata_core.server.security import Gate, host_name
from strata_core.settings import CORE, Settings, resolve

HELLO = {"messages": [{"role": "user", "content": "hello there, a prompt of some length"}]}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_with_keys_only_health_answers_without_one(make_client):
    client = make_client(api_key=("one", "two"))
    for path in ("/v1/models", "/metrics", "/props", "/slots", "/v1/plugins", "/v1/conversations", "/", "/nothing"):
        reply = client.get(path)
        assert reply.status_code == 401, path
        assert reply.get_json()["error"]["code"] == "invalid_api_key" and reply.headers["WWW-Authenticate"] == "Bearer"
    assert client.post("/v1/chat/completions", json=HELLO).status_code == 401
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("one"), 200),
        (bearer("two"), 200),
        ({"Authorization": "bearer two"}, 200),
        ({"x-api-key": "one"}, 200),
        (bearer("three"), 401),
        (bearer("on"), 401),
        (bearer("one "), 200),
        (bearer("oné"), 401),
        (bearer(""), 401),
        ({"Authorization": "Basic one"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys_come_as_bearer_or_x_api_key(make_client, headers, status):
    assert make_client(api_key=("one", "two")).get("/v1/models", headers=headers).status_code == status


def test_every_key_is_compared_in_constant_time(make_client, monkeypatch):
    compared = []

    def watch(a, b):
        compared.append(a)
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("strata_core.server.security.hmac.compare_digest", watch)
    client = make_client(api_key=("a", "b", "c"))
    assert client.get("/v1/models", headers=bearer("a")).status_code == 200
    assert compared == [b"a", b"b", b"c"]


def test_keys_are_also_read_from_a_file(make_client, tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfzeroth\n# mine\nfirst\n\n  second  \n")  # Windows' editors begin files with a mark
    client = make_client(api_key_file=path)
    assert client.get("/v1/models", headers=bearer("zeroth")).status_code == 200
    assert client.get("/v1/models", headers=bearer("second")).status_code == 200
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", "has space\n", "ümlaut\n"])
def test_a_key_file_without_usable_keys_is_an_error_and_not_an_open_server(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(SettingsError) as caught:
        Gate.from_settings(Settings(api_key_file=path))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("given", ["", " ", ",", ", ,"])
def test_a_key_that_is_given_and_empty_is_an_error_and_not_an_open_server(given):
    line = {"api_key": split_repeated([given])}  # --api-key "$KEY" where KEY is not set
    settings = resolve(CORE, command_line=line, environ={}, config=None)
    with pytest.raises(SettingsError, match="command line --api-key"):
        Gate.from_settings(settings)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("localhost.", 200),
        ("127.0.0.1:99", 200),
        ("127.8.9.1", 200),
        ("[::1]:8080", 200),
        ("strata.lan", 200),
        ("evil.example", 403),
        ("192.168.1.5", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
    ],
)
def test_without_keys_only_known_host_names_are_served(make_client, host, status):
    client = make_client(allowed_host=("Strata.LAN",))
    reply = client.get("/v1/models", headers={"Host": host})
    assert reply.status_code == status
    assert client.get("/health", headers={"Host": host}).status_code == 200
    if status == 403:
        assert "--allowed-host" in reply.get_json()["error"]["message"]


def test_listening_everywhere_accepts_addresses_but_no_foreign_names(make_client):
    client = make_client(host="0.0.0.0")
    assert client.get("/v1/models", headers={"Host": "192.168.1.5:8080"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert make_client(allowed_host=("*",)).get("/v1/models", headers={"Host": "any.name"}).status_code == 200


def test_host_names_do_not_matter_when_keys_are_needed(make_client):
    client = make_client(api_key=("k",))
    assert client.get("/v1/models", headers={"Host": "public.example", **bearer("k")}).status_code == 200


def test_from_browsers_only_the_same_origin_and_allowed_ones_are_served(make_client):
    client = make_client(allowed_origin=("https://chat.example/",))
    for origin, status in (
        (None, 200),
        ("http://localhost", 200),
        ("https://chat.example", 200),
        ("https://CHAT.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("http://[::1", 403),
        ("[", 403),
    ):
        headers = {"Host": "localhost"} | ({} if origin is None else {"Origin": origin})
        reply = client.post("/v1/chat/completions", json=HELLO, headers=headers)
        assert reply.status_code == status, origin
        readable = origin if "chat" in (origin or "").lower() else None
        assert reply.headers.get("Access-Control-Allow-Origin") == readable


def test_preflight_requests_of_allowed_origins_are_answered_without_a_key(make_client):
    client = make_client(allowed_origin=("https://chat.example",), api_key=("k",))
    headers = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    reply = client.options("/v1/chat/completions", headers=headers)
    assert reply.status_code == 204 and reply.get_data() == b""
    assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert reply.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "POST" in reply.headers["Access-Control-Allow-Methods"] and reply.headers["Vary"] == "Origin"
    refused = client.options("/v1/chat/completions", headers=headers | {"Origin": "https://evil.example"})
    assert refused.status_code == 403 and "Access-Control-Allow-Origin" not in refused.headers


def cached(client, key):
    usage = client.post("/v1/chat/completions", json=HELLO, headers=bearer(key)).get_json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_keys_do_not_share_a_cache_unless_the_operator_says_so(make_client, engine):
    client = make_client(api_key=("x", "y"))
    assert cached(client, "x") == 0 and cached(client, "x") > 0
    assert cached(client, "y") == 0
    assert len({request.tenant for request in engine.requests}) == 2
    assert not any(request.tenant == "x" for request in engine.requests)
    sharing = make_client(api_key=("x", "y"), share_cache=True)
    assert cached(sharing, "x") == 0 and cached(sharing, "y") > 0
    assert {request.tenant for request in engine.requests[-2:]} == {""}


def test_a_client_cannot_choose_its_tenant(make_client, engine):
    client = make_client(api_key=("x",))
    body = HELLO | {"tenant": "y", "user": "y", "cache_salt": "y"}
    for _ in range(2):
        client.post("/v1/chat/completions", json=body, headers=bearer("x"))
    assert len({request.tenant for request in engine.requests}) == 1


def test_requests_and_conversations_of_other_keys_look_like_unknown_ones(make_client):
    client = make_client(api_key=("x", "y"))
    reply = client.post("/v1/chat/completions", json=HELLO, headers=bearer("x")).get_json()
    assert client.get(f"/v1/requests/{reply['id']}", headers=bearer("x")).status_code == 200
    foreign = client.get(f"/v1/requests/{reply['id']}", headers=bearer("y"))
    assert foreign.status_code == 404
    assert client.get("/v1/conversations", headers=bearer("x")).get_json()["data"] == []
    for method, path in (("get", ""), ("delete", ""), ("post", "/pin"), ("post", "/unpin")):
        assert getattr(client, method)(f"/v1/conversations/c1{path}", headers=bearer("x")).status_code == 404


def test_what_a_slot_is_about_is_shown_to_its_owner_only(make_client, engine):
    client = make_client(api_key=("x", "y"))
    client.post("/v1/chat/completions", json=HELLO, headers=bearer("x"))
    tenant = engine.requests[-1].tenant
    engine.slots = lambda: [SlotInfo(0, "idle", "r1", "c1", 7, None, None, 4096, tenant=tenant)]
    (own,) = client.get("/slots", headers=bearer("x")).get_json()
    (foreign,) = client.get("/slots", headers=bearer("y")).get_json()
    assert (own["request_id"], own["conversation"], own["tokens"]) == ("r1", "c1", 7)
    assert foreign == own | {"request_id": None, "conversation": None} and "tenant" not in own


def test_host_headers_are_reduced_to_their_name():
    assert [host_name(text) for text in ("A.b:80", "[::1]:8", "", "a:b", "x@y")] == ["a.b", "::1", "", "a", "y"]
