"""Text completions through the application, on scripted replies."""

from __future__ import annotations

import pytest
from fake_engine import scripted
from test_openai_chat import events

from strata_core.errors import ContextLengthExceeded


def complete(client, prompt="Once upon", **fields):
    return client.post("/v1/completions", json={"prompt": prompt, **fields})


def test_a_completion_has_text_usage_and_an_id(client):
    reply = complete(client).get_json()
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["choices"] == [{"index": 0, "text": "Hello there.", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert complete(client).get_json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


def test_prompts_come_as_text_as_tokens_and_as_lists_of_either(client, engine):
    tokens = [int(token) for token in engine.tokenizer.encode("abc")]
    for prompt, texts in (
        (tokens, ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([tokens, tokens], ["abc", "abc"]),
    ):
        reply = complete(client, prompt, echo=True).get_json()
        assert [choice["text"] for choice in reply["choices"]] == [text + "Hello there." for text in texts]
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))


def test_several_choices_of_several_prompts_are_in_order(client, engine):
    reply = complete(client, ["a", "bb"], n=2, echo=True).get_json()
    assert [choice["text"][:2] for choice in reply["choices"]] == ["aH", "aH", "bb", "bb"]
    assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == 48
    assert [r.after for r in engine.requests] == [None, engine.requests[0].id, None, engine.requests[2].id]


def test_a_stream_concatenates_and_echoes_once(client):
    chunks = events(complete(client, "Say: ", stream=True, echo=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Say: Hello there."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("max_tokens", [None, 2])
def test_usage_is_one_extra_chunk_and_only_when_asked_for(client, max_tokens):
    options = {"include_usage": True}
    asked = events(complete(client, stream=True, max_tokens=max_tokens, stream_options=options))
    assert [chunk["choices"] for chunk in asked].count([]) == 1 == sum("usage" in chunk for chunk in asked)
    assert asked[-1]["usage"]["completion_tokens"] == (max_tokens or 12) and asked[-1]["choices"] == []
    unasked = events(complete(client, stream=True, stream_options={"include_usage": False}))
    assert not any("usage" in chunk for chunk in unasked)


def test_legacy_log_probabilities(client):
    found = complete(client, scripted(reply="aé"), logprobs=2).get_json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["token_logprobs"] == [-0.5] * 3 and found["text_offset"][:2] == [0, 1]
    assert found["top_logprobs"][0] == {"a": -1.0, "b": -2.0}
    chunks = events(complete(client, scripted(reply="xyz"), logprobs=0, stream=True))
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [item["tokens"] for item in shown] == [["x"], ["y"], ["z"]]
    assert [item["text_offset"] for item in shown] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": "x" * 5000}, "prompt"),
    ],
)
def test_invalid_fields_are_named(client, engine, fields, param):
    reply = complete(client, **{"prompt": "hi", **fields})
    assert reply.status_code == 400 and reply.get_json()["error"]["param"] == param
    assert not engine.requests


def test_no_choice_is_left_running_when_a_later_one_is_refused(client, engine):
    reply = complete(client, [scripted(reply="x" * 500, delay=0.01), "y" * 5000])
    assert reply.status_code == 400
    with engine._changed:
        engine._changed.wait_for(lambda: not engine.running and not engine.waiting, 2)
    assert engine.statuses == {"cancelled": 1}


@pytest.mark.parametrize(("culprit", "param"), [("messages", "prompt"), ("max_tokens", "max_tokens")])
def test_what_does_not_fit_the_context_is_named_as_this_endpoint_calls_it(client, engine, monkeypatch, culprit, param):
    def submit(request):
        raise ContextLengthExceeded("too long", param=culprit)

    monkeypatch.setattr(engine, "submit", submit)
    reply = client.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.get_json()["error"]["param"]) == (400, param)
