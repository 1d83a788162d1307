"""What the server tells about itself."""

from __future__ import annotations

import json

import pytest
from fake_engine import scripted
from prometheus_client.parser import text_string_to_metric_families

from strata_core import __version__
from strata_core.cli.options import SettingOption
from strata_core.server.collector import SOURCES
from strata_core.settings import CORE


def test_models_lists_the_name_and_its_aliases(client):
    listed = client.get("/v1/models").get_json()
    assert [model["id"] for model in listed["data"]] == ["fake", "other-name"] and listed["object"] == "list"
    assert client.get("/v1/models/fake").get_json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 4096
    assert client.get("/v1/models/nothing").status_code == 404


def test_tokenize_and_detokenize_are_inverse(client, engine):
    def tokenize(**body):
        return client.post("/tokenize", json=body).get_json()["tokens"]

    text = "Hello <|im_end|> 😊"
    parsed, plain = tokenize(content=text), tokenize(content=text, parse_special=False)
    assert parsed.count(258) == 1 and 258 not in plain
    for tokens in (parsed, plain):
        assert client.post("/detokenize", json={"tokens": tokens}).get_json() == {"content": text}
    pieces = tokenize(content="aé", with_pieces=True)
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert tokenize(content="") == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "x", "add_special": "no"}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
    ],
)
def test_token_endpoints_name_what_is_invalid(client, path, body, param):
    reply = client.post(path, json=body)
    assert reply.status_code == 400 and reply.get_json()["error"]["param"] == param


def test_the_root_says_what_this_is(client):
    assert client.get("/").get_json()["version"] == __version__


def test_props_and_help_come_from_one_table(make_client):
    shown = make_client(parallel=3, api_key=("secret-key",)).get("/props", headers={"x-api-key": "secret-key"})
    props = shown.get_json()
    assert set(props["settings"]) == {spec.name for spec in CORE}
    flags = {spec.name: SettingOption(spec, spec.name).opts[0] for spec in CORE}
    assert {name: entry["flag"] for name, entry in props["settings"].items()} == flags
    assert props["settings"]["parallel"] == {"flag": "--parallel", "value": 3, "source": "default", "owner": "strata"}
    assert props["settings"]["api_key"]["value"] == "set" and "secret-key" not in shown.get_data(as_text=True)
    assert props["geometry"]["layers"] == 1 and props["engine"] == {"backend": "script"}
    assert (props["max_context"], props["total_slots"], props["version"]) == (4096, 2, __version__)
    assert props["eos_token"] == "<|im_end|>" and "im_start" in props["chat_template"]


def samples(client, **options):
    text = client.get("/metrics", **options).get_data(as_text=True)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_the_engines_numbers_under_both_kinds_of_names(client):
    for _ in range(2):
        client.post("/v1/completions", json={"prompt": "abcdef"})
    found = samples(client)
    model = (("model_name", "fake"),)
    assert found["strata:requests_total", (("status", "stop"),)] == 2
    assert found["strata:prompt_tokens_total", ()] == found["vllm:prompt_tokens_total", model] == 12
    assert found["strata:generated_tokens_total", ()] == found["vllm:generation_tokens_total", model] == 24
    assert found["strata:reused_tokens_total", (("source", "ram"),)] == 5
    assert found["vllm:prefix_cache_hits_total", model] == 5
    assert found["vllm:prefix_cache_queries_total", model] == 12
    assert found["vllm:num_requests_running", model] == found["vllm:num_requests_waiting", model] == 0
    assert found["vllm:time_to_first_token_seconds_count", model] == 2
    assert found["vllm:e2e_request_latency_seconds_count", model] == 2
    assert found["vllm:kv_cache_usage_perc", model] == 0.25
    assert found["strata:level_bytes", (("level", "ram"),)] == 4096


def test_what_is_not_measured_has_no_sample(client, make_client):
    names = {name for name, _ in samples(client)}
    assert "strata:park_budget_bytes" not in names and "strata:level_max_conversations" not in names
    assert not any(name.startswith("strata:") for name, _ in samples(make_client(loaded=False)))
    assert all(source.help.endswith(".") for source in SOURCES)


def test_metrics_are_json_when_asked_for(client):
    client.post("/v1/completions", json={"prompt": "abc"})
    by_query = client.get("/metrics?format=json").get_json()
    by_accept = client.get("/metrics", headers={"Accept": "application/json"}).get_json()
    assert by_query["strata:prompt_tokens_total"] == by_accept["strata:prompt_tokens_total"] == 3
    assert by_query["strata:requests_total"] == [{"labels": {"status": "stop"}, "value": 1}]
    assert client.get("/metrics").mimetype == "text/plain"
    assert client.get("/metrics", headers={"Accept": "*/*"}).mimetype == "text/plain"
    assert client.get("/metrics?format=xml").status_code == 400


def test_two_applications_of_one_process_do_not_mix_their_metrics(make_client, client):
    client.post("/v1/completions", json={"prompt": "abc"})
    other = make_client()
    assert ("vllm:e2e_request_latency_seconds_count", (("model_name", "fake"),)) not in samples(other)


def test_slots_plugins_and_levels_are_listed(client):
    slots = client.get("/slots").get_json()
    assert [slot["id"] for slot in slots] == [0, 1] and slots[0]["state"] == "idle"
    assert client.get("/v1/plugins").get_json() == {"object": "list", "data": []}
    (level,) = client.get("/v1/levels").get_json()["data"]
    assert level["name"] == "ram" and level["bytes"] == 4096 and level["max_entries"] is None


def test_conversations_can_be_listed_pinned_and_deleted(client, engine):
    (shown,) = client.get("/v1/conversations").get_json()["data"]
    assert shown["id"] == "c1" and shown["pinned"] is False and "tenant" not in shown
    assert client.get("/v1/conversations/c1").get_json() == {"id": "c1", "copies": [shown]}
    assert client.post("/v1/conversations/c1/pin").get_json() == {"id": "c1", "pinned": True}
    assert engine.kept["c1"].pinned
    assert client.post("/v1/conversations/c1/unpin").get_json()["pinned"] is False and not engine.kept["c1"].pinned
    assert client.delete("/v1/conversations/c1").get_json() == {"id": "c1", "deleted": True}
    for method, path in (("get", ""), ("delete", ""), ("post", "/pin"), ("post", "/unpin")):
        assert getattr(client, method)(f"/v1/conversations/c1{path}").status_code == 404


def test_an_unknown_request_is_404(client):
    reply = client.get("/v1/requests/chatcmpl-nothing")
    assert reply.status_code == 404 and reply.get_json()["error"]["code"] == "not_found"


def test_a_reply_names_its_request_in_a_header(client):
    reply = client.post("/v1/completions", json={"prompt": scripted(reply="é")})
    assert reply.headers["X-Request-Id"] == json.loads(reply.data)["id"].removeprefix("cmpl-")
    assert "é".encode() in reply.data
