"""Chat completions through the application, on scripted replies."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine, scripted

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def chat(client, text="hello", **fields):
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})


def events(response):
    """Strictly parsed SSE: every block is one data line (or a comment), the last is [DONE]."""
    assert response.mimetype == "text/event-stream"
    text = response.get_data(as_text=True)
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


def test_a_reply_has_text_usage_and_an_id(client):
    reply = chat(client).get_json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-") and reply["model"] == "fake"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply["system_fingerprint"].startswith("strata-") and reply["created"] > 1e9
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + 12


def test_prompt_tokens_is_the_whole_prompt_and_cached_tokens_always_there(client):
    cold, warm, longer = (chat(client, text).get_json()["usage"] for text in ("abc", "abc", "abc and more"))
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["prompt_tokens"] == cold["prompt_tokens"]
    assert warm["prompt_tokens_details"] == {"cached_tokens": warm["prompt_tokens"] - 1}
    assert longer["prompt_tokens"] == cold["prompt_tokens"] + len(" and more")
    assert 0 < longer["prompt_tokens_details"]["cached_tokens"] < cold["prompt_tokens"]


def test_a_stream_concatenates_to_the_same_reply(client):
    chunks = events(chat(client, scripted(reply="Grüße, 世界 🙂"), stream=True))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Grüße, 世界 🙂"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and not any(reasons[:-1])


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_usage_is_one_extra_chunk_and_only_when_asked_for(client, max_tokens):
    plain = events(chat(client, stream=True, max_tokens=max_tokens))
    assert not any("usage" in chunk for chunk in plain) and all(chunk["choices"] for chunk in plain)
    asked = events(chat(client, stream=True, max_tokens=max_tokens, stream_options={"include_usage": True}))
    assert [chunk["choices"] for chunk in asked].count([]) == 1
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] == (max_tokens or 12)
    assert "cached_tokens" in asked[-1]["usage"]["prompt_tokens_details"]
    assert sum("usage" in chunk for chunk in asked) == 1


def test_max_tokens_ends_with_length(client):
    for name in ("max_tokens", "max_completion_tokens"):
        choice = chat(client, **{name: 5}).get_json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")


def test_choices_share_the_prompt_and_are_counted_once(client, engine):
    reply = chat(client, n=3, seed=7, strata_pin=True).get_json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    one = chat(client, "other text").get_json()["usage"]["prompt_tokens"] - len("other text") + len("hello")
    assert reply["usage"]["prompt_tokens"] == one and reply["usage"]["completion_tokens"] == 36
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first, second, third = engine.requests[:3]
    assert (first.after, second.after, third.after) == (None, first.id, first.id)
    assert [r.sampling.seed for r in (first, second, third)] == [7, 8, 9]
    assert [r.pin for r in (first, second, third)] == [True, False, False]


def test_a_shared_prefix_is_given_in_messages_and_reaches_the_engine_in_tokens(client, engine):
    messages = [{"role": role, "content": text} for role, text in (("system", "Be."), ("user", "a"), ("user", "b"))]
    ask = lambda **fields: client.post("/v1/chat/completions", json={"messages": messages, **fields})  # noqa: E731
    lengths = []
    for count in (1, 2, 3):
        assert ask(strata_prefix=count).status_code == 200
        request = engine.requests[-1]
        lengths.append(request.prefix)
    assert 0 < lengths[0] < lengths[1] < lengths[2] < len(request.prompt)
    ask()
    assert engine.requests[-1].prefix == 0
    for wrong in (0, 4, "1", True):
        assert ask(strata_prefix=wrong).get_json()["error"]["param"] == "strata_prefix"


def test_streams_of_several_choices_are_told_apart(client):
    chunks = events(chat(client, scripted(reply="abc"), n=2, stream=True))
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abc"
        assert mine[-1]["finish_reason"] == "stop"


def test_the_operators_default_limit_is_cut_to_the_context_and_the_clients_own_is_not(make_client, engine):
    client = make_client(max_tokens=10**6)
    assert chat(client).status_code == 200
    (request,) = engine.requests
    assert request.max_tokens == engine.max_context - len(request.prompt)
    assert chat(client, max_tokens=10**6).get_json()["error"]["code"] == "context_length_exceeded"


def test_sampling_fields_reach_the_engine_and_defaults_come_from_the_settings(make_client, engine):
    client = make_client(temperature=0.3, top_k=11, max_tokens=4)
    chat(client)
    given = engine.requests[-1]
    assert (given.sampling.temperature, given.sampling.top_k, given.max_tokens) == (0.3, 11, 4)
    chat(
        client, temperature=0, top_p=0.5, min_p=0.1, typical_p=0.9, repeat_penalty=1.2, repeat_last_n=9, seed=3,
        presence_penalty=-1, frequency_penalty=1.5, logit_bias={"65": 5}, stop="x", ignore_eos=True, strata_cache=False,
        max_completion_tokens=7, user="someone", some_future_field=1,
    )  # fmt: skip
    given = engine.requests[-1]
    s = given.sampling
    assert (s.temperature, s.top_p, s.min_p, s.typical_p, s.repetition_penalty) == (0, 0.5, 0.1, 0.9, 1.2)
    assert (s.penalty_window, s.seed, s.presence_penalty, s.frequency_penalty) == (9, 3, -1, 1.5)
    assert dict(s.logit_bias) == {65: 5.0} and given.stop == ("x",) and given.ignore_eos and not given.cache
    assert given.max_tokens == 7


def test_log_probabilities_have_bytes_and_alternatives(client):
    choice = chat(client, scripted(reply="aé"), logprobs=True, top_logprobs=2).get_json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert content[0]["token"] == "a" and content[0]["bytes"] == [97] and content[0]["logprob"] == -0.5
    assert [item["token"] for item in content[0]["top_logprobs"]] == ["a", "b"]
    assert [item["bytes"] for item in content] == [[97], [0xC3], [0xA9]]
    streamed = events(chat(client, scripted(reply="aé"), logprobs=True, stream=True))
    found = [item for chunk in streamed for item in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [item["bytes"] for item in found] == [[97], [0xC3], [0xA9]] and found[0]["top_logprobs"] == []


def test_tool_calls_are_read_from_the_reply(client):
    choice = chat(client, scripted(reply="Let me see. " + TWO_CALLS), tools=[WEATHER]).get_json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert all(call["type"] == "function" and call["function"]["name"] == "weather" for call in calls)
    assert len({call["id"] for call in calls}) == 2
    alone = chat(client, scripted(reply=CALL), tools=[WEATHER]).get_json()["choices"][0]["message"]
    assert alone["content"] is None


def test_streamed_tool_calls_have_an_index_always_and_id_and_name_once(client):
    chunks = events(chat(client, scripted(reply=TWO_CALLS), tools=[WEATHER], stream=True))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert all(isinstance(delta["index"], int) for delta in deltas)
    for index, city in enumerate(("Oslo", "Rome")):
        mine = [delta for delta in deltas if delta["index"] == index]
        assert mine[0]["id"] and mine[0]["function"]["name"] == "weather" and mine[0]["type"] == "function"
        assert not any("id" in delta or "name" in delta["function"] for delta in mine[1:])
        assert json.loads("".join(delta["function"]["arguments"] for delta in mine)) == {"city": city}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "tool_call>" not in "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_a_call_that_was_cut_short_keeps_the_reason_length(client):
    reply = chat(client, scripted(reply=CALL + " and"), tools=[WEATHER], max_tokens=len(CALL) + 2).get_json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) == 1


def test_only_one_call_is_shown_when_parallel_ones_are_not_wanted(client):
    for stream in (False, True):
        reply = chat(
            client, scripted(reply=TWO_CALLS), tools=[WEATHER], parallel_tool_calls=False, stream=stream
        )
        if stream:
            calls = [c for e in events(reply) for c in e["choices"][0]["delta"].get("tool_calls", ())]
            assert {call["index"] for call in calls} == {0}
        else:
            assert len(reply.get_json()["choices"][0]["message"]["tool_calls"]) == 1


def test_without_tools_a_call_is_just_text(make_client, client):
    assert chat(client, scripted(reply=CALL)).get_json()["choices"][0]["message"]["content"] == CALL
    off = make_client(tool_parser="off")
    assert chat(off, scripted(reply=CALL), tools=[WEATHER]).get_json()["choices"][0]["message"]["content"] == CALL


def test_tool_choice_decides_what_the_template_shows(client):
    def rendered(**fields):
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return client.post("/v1/chat/completions/render", json=body).get_json()["text"]

    other = {"type": "function", "function": {"name": "other"}}
    assert "weather" in rendered(tools=[WEATHER]) and "weather" not in rendered(tools=[WEATHER], tool_choice="none")
    named = rendered(tools=[WEATHER, other], tool_choice={"type": "function", "function": {"name": "other"}})
    assert '"other"' in named and "weather" not in named


def test_thinking_is_reported_apart(make_client, client):
    text = scripted(reply="<think>\nhm\n</think>\n\nYes.")
    message = chat(client, text).get_json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    deltas = [e["choices"][0]["delta"] for e in events(chat(client, text, stream=True))]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    begun = chat(client, scripted(reply="hm</think>Yes."), chat_template_kwargs={"thinking": True}).get_json()
    assert begun["choices"][0]["message"]["reasoning_content"] == "hm"
    off = chat(make_client(reasoning_parser="off"), text).get_json()["choices"][0]["message"]
    assert off["content"].startswith("<think>") and "reasoning_content" not in off


def test_content_may_be_text_parts_and_control_texts_in_it_stay_text(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two <|im_end|>"}]
    body = {"messages": [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]}
    prompt = client.post("/v1/chat/completions/render", json=body).get_json()
    assert prompt["text"] == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none\ntwo <|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt["tokens"].count(258) == 2 and prompt["count"] == len(prompt["tokens"])


def test_the_ledger_comes_when_asked_for_and_can_be_fetched_later(client):
    reply = chat(client, strata=True).get_json()
    (record,) = reply["strata"]["requests"]
    assert record["status"] == "stop" and record["read_tokens"] == reply["usage"]["prompt_tokens"]
    assert "tenant" not in record
    assert client.get(f"/v1/requests/{reply['id']}").get_json() == record
    assert client.get(f"/v1/requests/{record['id']}").get_json() == record
    assert "strata" not in chat(client).get_json()
    last = events(chat(client, strata=True, stream=True))[-1]
    assert last["choices"] == [] and last["strata"]["requests"][0]["status"] == "stop" and "usage" not in last


def test_progress_of_reading_is_streamed_when_asked_for(client):
    chunks = events(chat(client, "x" * 200, stream=True, return_progress=True))
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"] and len(progress) > 1
    assert not any("prompt_progress" in chunk for chunk in events(chat(client, "y" * 200, stream=True)))


def test_a_failure_before_the_first_byte_is_a_status_and_after_it_an_event(client):
    early = chat(client, scripted(fail_after=0), stream=False)
    assert early.status_code == 500 and early.get_json()["error"]["code"] == "backend_error"
    late = events(chat(client, scripted(reply="abcdef", fail_after=3), stream=True))
    assert late[-1]["error"]["message"] == "the device went away" and late[-1]["error"]["code"] == "backend_error"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in late[:-1]) == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_refused_with_both_numbers_before_anything_is_sent(client, stream):
    reply = chat(client, "x" * 5000, stream=stream)
    error = reply.get_json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "4096" in error["message"] and "50" in error["message"]


@pytest.mark.parametrize("template", [None, "{% broken", "{{ raise_exception('no') }}"])
def test_without_a_usable_template_chat_is_400_and_completions_work(make_client, template):
    client = make_client(engine=FakeEngine(template=template))
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        reply = client.post(path, json={"messages": [{"role": "user", "content": "hi"}]})
        assert reply.status_code == 400 and reply.get_json()["error"]["code"] == "chat_template_error"
    assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_a_template_that_refuses_the_messages_is_400(client):
    reply = chat(client, "refuse me", stream=True)
    assert reply.status_code == 400 and "refused by the template" in reply.get_json()["error"]["message"]
