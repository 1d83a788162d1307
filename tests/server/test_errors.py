"""Refusals: their status, their shape, and the field they name."""

from __future__ import annotations

import json

import pytest

from strata_core.server.fields import UNSUPPORTED

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}


def error_of(response, status):
    assert response.status_code == status, response.get_data(as_text=True)
    (error,) = response.get_json().values()
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        *[({name: 10**400}, name) for name in ("n", "max_tokens", "top_k", "penalty_window", "seed")],
        *[({name: -(10**4000)}, name) for name in ("max_tokens", "top_k", "repeat_last_n", "seed")],
        ({"min_p": 1.1}, "min_p"),
        ({"typical_p": -0.1}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": "usage"}, "stream_options"),
        ({"return_progress": True}, "return_progress"),
        ({"strata_cache": "no"}, "strata_cache"),
        ({"strata_pin": 1}, "strata_pin"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": 5}, "model"),
        *[({name: {"a": 1}}, name) for name in UNSUPPORTED],
    ],
)
def test_an_invalid_field_is_400_and_named(client, engine, fields, param):
    reply = client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    error = error_of(reply, 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert not engine.requests


def test_a_number_with_as_many_digits_as_json_is_read_with_is_400(client, engine):
    raw = b'{"prompt": "x", "max_tokens": ' + b"9" * 4300 + b"}"  # one more, and it has too many digits to be printed
    assert error_of(client.post("/v1/completions", data=raw), 400)["param"] == "max_tokens"
    assert not engine.requests


def test_null_counts_as_absent_and_text_as_the_format_is_fine(client):
    fields = dict.fromkeys(("n", "max_tokens", "temperature", "stop", "tools", "stream_options", "seed", "user"))
    body = {"messages": HELLO, "response_format": {"type": "text"}, "grammar": None, **fields}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"null", b'{"messages": NaN}', b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_400(client, raw):
    error_of(client.post("/v1/chat/completions", data=raw), 400)


def test_another_model_is_404_and_its_names_are_not(client):
    error = error_of(client.post("/v1/chat/completions", json={"messages": HELLO, "model": "gpt-9"}), 404)
    assert error["param"] == "model" and "fake" in error["message"]
    for name in ("fake", "other-name", "default", None):
        assert client.post("/v1/chat/completions", json={"messages": HELLO, "model": name}).status_code == 200


def test_more_choices_than_can_ever_wait_are_400_and_not_try_again(make_client, engine):
    client = make_client(queue=2)
    error = error_of(client.post("/v1/chat/completions", json={"messages": HELLO, "n": 5}), 400)
    assert error["param"] == "n" and "hold 4" in error["message"]
    error = error_of(client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3}), 400)
    assert error["param"] == "prompt" and not engine.requests


def test_unknown_routes_and_methods_have_the_same_shape(client):
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    reply = client.get("/v1/chat/completions")
    assert error_of(reply, 405)["code"] == "method_not_allowed" and "POST" in reply.headers["Allow"]


def test_a_bug_is_500_without_its_details(client, engine, caplog):
    engine.submit = lambda request: 1 / 0
    error = error_of(client.post("/v1/chat/completions", json={"messages": HELLO}), 500)
    assert "division" not in error["message"] and error["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_the_middle_of_a_stream_ends_it_cleanly(client, monkeypatch, caplog):
    from strata_core.server import sse

    monkeypatch.setattr(sse, "data", lambda value, real=sse.data: real(value if "error" in value else {"x": 1 / 0}))
    text = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}).get_data(as_text=True)
    first, last, end = text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == "internal_error" and last == "data: [DONE]"
    assert end == "" and "ZeroDivisionError" in caplog.text


def test_too_large_a_body_is_413(make_client):
    client = make_client(max_body_mib=1)
    big = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
    error = error_of(client.post("/v1/chat/completions", data=big), 413)
    assert error["code"] == "payload_too_large" and "1 MiB" in error["message"]


def test_while_loading_and_draining_requests_are_503_with_retry_after(make_client, engine):
    client = make_client(loaded=False)
    for path in ("/v1/models", "/props", "/slots", "/v1/conversations"):
        assert error_of(client.get(path), 503)["code"] == "overloaded"
    reply = client.post("/v1/chat/completions", json={"messages": HELLO})
    assert "still being loaded" in error_of(reply, 503)["message"] and int(reply.headers["Retry-After"]) > 0
    health = client.get("/health")
    assert (health.status_code, health.get_json()["status"]) == (503, "loading") and "Retry-After" in health.headers

    client.holder.load(lambda progress: engine)
    assert client.get("/health").get_json() == {"status": "ok"}
    client.holder.begin_drain()
    health = client.get("/health")
    assert (health.status_code, health.get_json()["status"]) == (503, "draining")
    reply = client.post("/v1/completions", json={"prompt": "x"})
    assert "draining" in error_of(reply, 503)["message"] and int(reply.headers["Retry-After"]) > 0
    assert client.get("/slots").status_code == 200


def test_a_model_that_failed_to_load_says_so(make_client):
    client = make_client(loaded=False)
    with pytest.raises(ZeroDivisionError):
        client.holder.load(lambda progress: 1 / 0)
    assert client.get("/health").get_json()["status"] == "failed"
    assert "could not be loaded" in error_of(client.get("/v1/models"), 503)["message"]


def test_an_engine_that_arrives_after_the_server_was_stopped_is_closed(engine):
    from strata_core.server.holder import EngineHolder

    holder = EngineHolder()
    holder.shut_down(0)
    assert holder.load(lambda progress: engine) is None and engine.closed
