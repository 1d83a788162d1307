"""The official client, unmodified, against a real server process with scripted replies."""

from __future__ import annotations

import json

import openai
import pytest
from fake_engine import scripted

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TWO_CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Oslo", "Rome")
)


@pytest.fixture
def client(shared_server):
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def ask(text):
    return {"model": "fake", "messages": [{"role": "user", "content": text}]}


def test_chat(client):
    reply = client.chat.completions.create(**ask("hi"), temperature=0, max_tokens=100)
    assert reply.choices[0].message.content == "Hello there." and reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens is not None
    assert reply._request_id


def test_streamed_chat_with_usage(client):
    ask_for = ask(scripted(reply="世界 🙂"))
    chunks = list(client.chat.completions.create(**ask_for, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "世界 🙂"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len("世界 🙂".encode())
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_the_stream_helper_collects_parallel_tool_calls(client):
    with client.chat.completions.stream(**ask(scripted(reply=TWO_CALLS)), tools=[WEATHER]) as stream:
        seen = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [json.loads(event.arguments)["city"] for event in seen] == ["Oslo", "Rome"]
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    parsed = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert parsed == [{"city": "Oslo"}, {"city": "Rome"}]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_the_stream_helper_collects_text(client):
    with client.chat.completions.stream(**ask("hi")) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content == "Hello there."


def test_a_tool_result_goes_back_into_the_conversation(client):
    first = client.chat.completions.create(**ask(scripted(reply=TWO_CALLS)), tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls]
    messages = [{"role": "user", "content": "weather?"}, first, *results]
    reply = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "Hello there."


def test_completions(client):
    reply = client.completions.create(model="fake", prompt=["a", "b"], n=2, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["Hello there."] * 4
    assert reply.choices[0].logprobs.tokens[0] == "H"
    chunks = list(client.completions.create(model="fake", prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there."


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake", "other-name"]
    assert client.models.retrieve("fake").owned_by == "strata"


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask("x" * 5000), stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError, match="the device went away"):
        list(client.chat.completions.create(**ask(scripted(reply="abc", fail_after=2)), stream=True))
