"""`strata serve` and `strata chat` as users run them: real processes, real engine, a tiny random model."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from strata_core.testing.server import STRATA, launch, serve
from strata_core.testing.tiny import tiny_llama

CONTEXT = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def server(model):
    started = serve("--model", str(model), "--parallel", "2", "--queue", "2", "--temperature", "0")
    yield started
    assert started.stop() == 0, started.log
    assert "Traceback" not in started.log, started.log


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def get(server, path, **headers):
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=10) as reply:
        return json.load(reply)


def post(server, path, body, **headers):
    """Status and JSON of a request."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def send(server, body):
    """A socket on which a completion request was sent."""
    address = urlsplit(server.url)
    raw = json.dumps(body).encode()
    sock = socket.create_connection((address.hostname, address.port), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def quiet(server):
    found = get(server, "/metrics?format=json")
    return found["strata:requests_running"] == found["strata:requests_queued"] == 0


def turns(client, first):
    """A conversation of three turns: replies and usages."""
    messages, replies, usages = [], [], []
    for text in (first, "and then?", "what else?"):
        messages.append({"role": "user", "content": text})
        reply = client.chat.completions.create(model="default", messages=messages, max_tokens=12)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        replies.append(messages[-1]["content"])
        usages.append(reply.usage)
    return replies, usages


def test_a_conversation_is_not_read_again_and_reads_the_same_as_without_reuse(client, model, live_server):
    first = "tell me of the people who found the way " * 3
    replies, usages = turns(client, first)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    # A random model writes what no tokenizer would, so a reply may be read again in other tokens; its prompt may not.
    assert cached[0] == 0 and cached[1] >= usages[0].prompt_tokens and cached[2] >= usages[1].prompt_tokens
    plain = live_server("--model", str(model), "--no-conversation-cache", "--temperature", "0")
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="any") as without:
        same, usages = turns(without, first)
    assert same == replies
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 0, 0]


def test_streams_concatenate_to_the_whole_reply_with_usage_once(client):
    ask = {"model": "default", "prompt": "the people", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_several_choices_share_the_prompt(client):
    reply = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hello world " * 20}],
        n=3, seed=5, temperature=1, max_tokens=8, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert all(len(token.top_logprobs) == 2 for choice in reply.choices for token in choice.logprobs.content)


def test_the_context_is_a_hard_limit_with_both_numbers(server):
    def ask(tokens, max_tokens=None, stream=False):
        body = {"prompt": [300] * tokens, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
        return post(server, "/v1/completions", body)

    for stream in (False, True):
        for tokens, wanted in ((CONTEXT + 1, None), (CONTEXT - 10, 11)):
            status, body = ask(tokens, wanted, stream)
            error = body["error"]
            assert status == 400 and error["code"] == "context_length_exceeded"
            assert str(tokens) in error["message"] and str(CONTEXT) in error["message"]
    status, body = ask(CONTEXT - 10, 10)
    assert status == 200 and body["choices"][0]["finish_reason"] == "length"
    status, body = ask(CONTEXT - 5)
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["total_tokens"] <= CONTEXT + 1


def test_beyond_slots_and_queue_requests_are_503(server):
    wait_until(lambda: quiet(server))
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(server, "/v1/completions", body), range(8)))
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 4
    assert all(answer["error"]["code"] == "overloaded" for status, answer in answers if status == 503)


def test_one_shots_hang_ups_and_cancelled_waiters_leave_nothing_behind(model, live_server):
    server = live_server(
        "--model", str(model), "--parallel", "2", "--queue", "60", "--conversation-cache-mib", "1"
    )  # fmt: skip
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]

    def resident():
        return sum(process.memory_info().rss for process in processes)

    def one_shots(count, start):
        for i in range(start, start + count):
            assert post(server, "/v1/completions", {"prompt": f"{i} " * 40, "max_tokens": 2})[0] == 200

    endless = {"max_tokens": 450, "ignore_eos": True}
    one_shots(40, 0)
    baseline = resident()
    one_shots(160, 40)
    for i in range(100):
        sock = send(server, {"prompt": f"{i} hangs up", "stream": True, **endless})
        sock.recv(200)
        sock.close()
    wait_until(lambda: quiet(server), 30)
    cancelled = get(server, "/metrics?format=json")["strata:requests_cancelled_total"]
    busy = [send(server, {"prompt": f"busy {i}", "stream": True, **endless}) for i in range(2)]
    waiting = [send(server, {"prompt": f"waiting {i}", **endless}) for i in range(50)]
    for sock in (*waiting, *busy):
        sock.close()
    wait_until(lambda: quiet(server), 30)
    after = get(server, "/metrics?format=json")
    assert after["strata:requests_cancelled_total"] >= cancelled + 40
    assert after["strata:parked_bytes"] <= 1 << 20
    assert resident() - baseline < 24 << 20
    assert post(server, "/v1/completions", {"prompt": "still there", "max_tokens": 2})[0] == 200
    assert server.stop() == 0 and "Traceback" not in server.log, server.log


def test_keys_do_not_see_each_others_cache(model, live_server):
    server = live_server("--model", str(model), "--api-key", "one", "--api-key", "two")
    body = {"prompt": "the people of this world " * 10, "max_tokens": 4}

    def cached(key):
        reply = post(server, "/v1/completions", body, Authorization=f"Bearer {key}")[1]
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0 and cached("one") > 0 and cached("two") == 0
    assert post(server, "/v1/completions", body)[0] == 401
    assert get(server, "/v1/conversations", **{"x-api-key": "one"})["data"]


def test_help_and_props_agree(server):
    shown = subprocess.run([*STRATA, "serve", "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    flags = set(re.findall(r"--[\w-]+", shown)) - {"--help", "--config"}
    settings = get(server, "/props")["settings"]
    positive = {flag for flag in flags if not flag.startswith("--no-")}
    assert {entry["flag"] for entry in settings.values()} == positive
    assert settings["parallel"]["value"] == 2 and settings["parallel"]["source"] == "command line --parallel"


def test_state_endpoints_show_the_real_engine(server, client):
    reply = client.completions.create(model="default", prompt="hello", max_tokens=3)
    assert get(server, f"/v1/requests/{reply.id}")["status"] in ("stop", "length")
    assert [slot["state"] for slot in get(server, "/slots")] == ["idle", "idle"]
    (kept, *_) = get(server, "/v1/conversations")["data"]
    assert post(server, f"/v1/conversations/{kept['id']}/pin", {})[1]["pinned"] is True
    assert get(server, f"/v1/conversations/{kept['id']}")["copies"][0]["pinned"] is True
    request = urllib.request.Request(f"{server.url}/v1/conversations/{kept['id']}", method="DELETE")
    with urllib.request.urlopen(request, timeout=10) as done:
        assert json.load(done)["deleted"] is True
    assert kept["id"] not in [item["id"] for item in get(server, "/v1/conversations")["data"]]
    assert [level["name"] for level in get(server, "/v1/levels")["data"]] == ["ram"]
    wrong = [p for p in get(server, "/v1/plugins")["data"] if p["status"] not in ("active", "blocked")]
    assert wrong == []


def test_what_is_wrong_with_the_model_is_said_before_a_server_starts(tmp_path, model):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model.read_bytes()[:3000])
    foreign = tiny_llama(tmp_path / "foreign.gguf", metadata={"general.architecture": "unheard-of"})
    for arguments, code, words in (
        (("--model", str(tmp_path / "missing.gguf")), 3, "missing.gguf"),
        (("--model", str(damaged)), 4, "damaged.gguf"),
        (("--model", str(foreign)), 4, "unheard-of"),
        (("--model", str(model), "--parallel", "none"), 2, "parallel"),
        (("--model", str(model), "--api-key-file", str(tmp_path / "none")), 2, "api_key_file"),
    ):
        server = launch((*STRATA, "serve", "--port", "0", *arguments))
        assert server.wait(60) == code, server.log
        assert words in server.log and "Traceback" not in server.log and "loading" not in server.log


def talk(*arguments, say):
    return subprocess.run([*STRATA, "chat", *arguments], input=say, capture_output=True, text=True, timeout=120)


def test_chat_talks_to_a_server_and_shows_what_was_cached(server):
    done = talk("--url", server.url + "/v1/", "--max-tokens", "5", say="hello\nagain\n/reset\n/what\nhello\n/exit\n")
    assert done.returncode == 0, done.stderr
    summaries = re.findall(r"prompt (\d+) = (\d+) cached \+ (\d+) read ( · first token [\d.]+ s)?", done.stdout)
    assert len(summaries) == 3
    assert int(summaries[1][1]) > int(summaries[0][0]) - 1
    assert "a new conversation" in done.stdout and "there is no command /what" in done.stdout
    assert summaries[2][0] == summaries[0][0]
    ignored = talk("--url", server.url, "--parallel", "3", say="hello\n")
    assert ignored.returncode == 2 and "--parallel cannot change the server" in ignored.stderr


def test_chat_without_a_server_loads_the_model_itself(model):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        done = talk("--model", str(model), "--port", port, "--max-tokens", "5", "--system", "be kind", say="hello\n")
    assert done.returncode == 0, done.stderr
    assert "no server answers" in done.stdout and "0 cached" in done.stdout
    nobody = talk("--url", f"http://127.0.0.1:{port}", say="hello\n")
    assert nobody.returncode == 1 and "no server answers" in nobody.stderr


def test_chat_shows_the_servers_words_when_it_refuses(model):
    done = talk("--model", str(model), "--local", say="hello " * 600 + "\nhi\n/exit\n")
    assert "the context holds 512" in done.stdout and done.stdout.count("cached") == 1
    assert done.returncode == 0


@pytest.mark.model
def test_the_default_model_answers_within_seconds_of_a_start(default_model_path, live_server):
    begun = time.monotonic()
    server = live_server("--model", str(default_model_path), "--temperature", "0")
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    status, reply = post(server, "/v1/chat/completions", body)
    assert status == 200 and "Paris" in reply["choices"][0]["message"]["content"]
    assert time.monotonic() - begun < 60
