"""The server as a process: disconnects, overload, start, stop and crash. Real sockets, scripted engine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from urllib.parse import urlsplit

import psutil
import pytest
from fake_engine import scripted

LONG = "x" * 600


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=10) as reply:
        return json.load(reply)


def post(server, text, **fields):
    """(status, headers, body) of a chat request."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    try:
        with urllib.request.urlopen(f"{server.url}/v1/chat/completions", body, timeout=30) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def open_request(server, text, **fields):
    """A socket on which a chat request was sent."""
    address = urlsplit(server.url)
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    sock = socket.create_connection((address.hostname, address.port), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def metric(server, name):
    value = get(server, "/metrics?format=json").get(name)
    return value if not isinstance(value, list) else {item["labels"]["status"]: item["value"] for item in value}


def wait_until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return time.monotonic()
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


def quiet(server):
    return metric(server, "strata:requests_running") == 0 == metric(server, "strata:requests_queued")


@pytest.mark.parametrize("carrier", ["gunicorn", "waitress"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["reading", "generating"])
def test_a_client_that_hangs_up_frees_its_slot_at_once(fake_server, carrier, stream, when):
    server = fake_server(settings={"parallel": 1, "server": carrier})
    script = {"read": 10} if when == "reading" else {"reply": LONG, "delay": 0.05}
    sock = open_request(server, scripted(**script), stream=stream)
    wait_until(lambda: metric(server, "strata:requests_running") == 1)
    time.sleep(0.3)
    sock.close()
    gone = time.monotonic()
    wait_until(lambda: quiet(server))
    # One step of the script's reading is 0.3 s long.
    assert time.monotonic() - gone < 1.5
    assert metric(server, "strata:requests_cancelled_total") == 1
    assert post(server, "still there?")[0] == 200
    assert server.stop() == 0 and "Traceback" not in server.log, server.log


def test_a_client_that_hangs_up_while_it_waits_never_runs(fake_server):
    server = fake_server(settings={"parallel": 1, "queue": 2})
    busy = open_request(server, scripted(reply=LONG, delay=0.05), stream=True)
    wait_until(lambda: metric(server, "strata:requests_running") == 1)
    waiting = [open_request(server, scripted(reply="never"), stream=stream) for stream in (True, False)]
    wait_until(lambda: metric(server, "strata:requests_queued") == 2)
    for sock in waiting:
        sock.close()
    wait_until(lambda: metric(server, "strata:requests_queued") == 0, 2)
    assert metric(server, "strata:requests_running") == 1
    assert metric(server, "strata:requests_cancelled_total") == 2
    busy.close()
    wait_until(lambda: quiet(server))


def test_other_streams_do_not_notice_clients_that_hang_up(fake_server):
    server = fake_server(settings={"parallel": 8, "queue": 40})
    expected = "".join(chr(97 + i % 26) for i in range(80))
    with ThreadPoolExecutor(4) as pool:
        steady = [pool.submit(post, server, scripted(reply=expected, delay=0.02), stream=True) for _ in range(4)]
        for _ in range(30):
            sock = open_request(server, scripted(reply=LONG, delay=0.02), stream=True)
            time.sleep(0.02)
            sock.close()
        for future in steady:
            status, _, body = future.result()
            events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: {")]
            assert status == 200
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == expected
    wait_until(lambda: quiet(server))
    assert server.stop() == 0 and "Traceback" not in server.log, server.log


def test_beyond_the_queue_requests_are_503_with_retry_after(fake_server):
    server = fake_server(settings={"parallel": 1, "queue": 2})
    with ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(post, server, scripted(reply="abcde", delay=1.0)) for _ in range(3)]
        wait_until(lambda: metric(server, "strata:requests_queued") == 2)
        for _ in range(3):
            status, headers, body = post(server, scripted(reply="abcde"))
            assert status == 503
            assert int(headers["Retry-After"]) > 0 and json.loads(body)["error"]["code"] == "overloaded"
    assert [future.result()[0] for future in taken] == [200] * 3
    assert get(server, "/health") == {"status": "ok"}


def test_a_silent_stream_gets_comments(fake_server):
    server = fake_server(settings={"parallel": 1, "keep_alive_s": 0.2})
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server, scripted(reply="ab", read=1.0), stream=True)
        wait_until(lambda: metric(server, "strata:requests_running") == 1)
        queued = pool.submit(post, server, scripted(reply="cd"), stream=True)
        for future, text in ((first, "ab"), (queued, "cd")):
            blocks = future.result()[2].decode().split("\n\n")
            comments = [block for block in blocks if block.startswith(":")]
            assert len(comments) >= 3 and set(comments) == {": keep-alive"}
            found = [json.loads(block[6:])["choices"][0]["delta"] for block in blocks if block.startswith("data: {")]
            assert "".join(delta.get("content", "") for delta in found) == text


def test_a_failure_while_reading_is_a_status_when_it_comes_before_the_first_comment(fake_server):
    server = fake_server(settings={"parallel": 1})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, "x" * 4090, stream=True, max_tokens=10)
        assert waiting.result()[0] == 400


@pytest.mark.parametrize("carrier", ["gunicorn", "waitress"])
def test_a_body_is_bounded_whether_its_length_is_announced_or_not(fake_server, carrier):
    server = fake_server(settings={"max_body_mib": 1, "server": carrier})
    address = urlsplit(server.url)
    big = [b"x" * 65536] * 17
    small = [b'{"messages": [{"role": "user", ', b'"content": "hi"}]}']
    for body, status in ((iter(big), 413), (b"".join(big), 413), (iter(small), 200), (b"".join(small), 200)):
        with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=10)) as connection:
            connection.request("POST", "/v1/chat/completions", body)
            reply = connection.getresponse()
            assert reply.status == status
            found = json.loads(reply.read())
            assert status == 200 or found["error"]["code"] == "payload_too_large"


def test_clients_that_vanish_within_their_request_do_not_hold_the_server(fake_server):
    server = fake_server(receive_s=0.5, settings={"parallel": 1, "queue": 0})
    address = urlsplit(server.url)
    threads = 17  # slots, queue and 16 more
    half = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{",
    )
    with ExitStack() as cleanup:
        socks = []
        for number in range(threads):
            sock = socket.create_connection((address.hostname, address.port), timeout=10)
            socks.append(cleanup.enter_context(sock))
            sock.sendall(half[number % 2])
        assert get(server, "/health") == {"status": "ok"}
        for number, sock in enumerate(socks):
            answer = b"".join(iter(partial(sock.recv, 1 << 16), b""))
            assert answer == b"" if number % 2 == 0 else b" 400 " in answer and b"did not arrive" in answer, answer
    assert "Traceback" not in server.log


def test_clients_that_do_not_close_their_end_keep_nobody_waiting(fake_server):
    server = fake_server()
    address = urlsplit(server.url)
    start = time.monotonic()
    with ExitStack() as cleanup:
        for _ in range(8):
            sock = socket.create_connection((address.hostname, address.port), timeout=10)
            cleanup.enter_context(sock)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in b"".join(iter(partial(sock.recv, 1 << 16), b""))  # until the server closed its end
        assert get(server, "/health") == {"status": "ok"}
    assert time.monotonic() - start < 8  # 16 s if each were waited for


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ("Transfer-Encoding: chunked", b"zz\r\n", b"Invalid chunk size"),
        ("Content-Length: 99", b'{"content": "x"}', b"ended after 16 of 99 bytes"),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/conversations/import"])
def test_a_body_that_is_not_framed_as_announced_is_400(fake_server, path, head, body, said):
    server = fake_server()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body)
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(partial(sock.recv, 1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400") and said in answer
    assert "Traceback" not in server.log


@pytest.mark.parametrize("carrier", ["gunicorn", "waitress"])
def test_health_says_loading_then_ok_and_ready_is_said_once(fake_server, carrier):
    server = fake_server(wait=False, load_s=1.5, settings={"server": carrier, "port": 0})
    server.wait_for_line("reading weights")
    port = wait_for_port(server.pid)
    server.url = f"http://127.0.0.1:{port}"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, "/health")
    assert caught.value.code == 503 and json.load(caught.value)["status"] == "loading"
    status, headers, body = post(server, "too early")
    assert status == 503 and int(headers["Retry-After"]) > 0 and "being loaded" in json.loads(body)["error"]["message"]
    server.wait_until_healthy(10)
    assert server.wait_for_line(r"ready at (\S+)")[1] == server.url
    assert post(server, "now")[0] == 200
    assert server.stop() == 0
    assert server.log.count("ready at") == 1
    assert f"ready at {server.url} (model fake, backend script, context 4096, slots 4)" in server.log


def wait_for_port(pid):
    found = []

    def listening():
        process = psutil.Process(pid)
        for one in (process, *process.children()):
            found.extend(c.laddr.port for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        return found

    wait_until(listening, 10)
    return found[0]


@pytest.mark.parametrize("carrier", ["gunicorn", "waitress"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_on_a_signal_running_requests_finish_and_new_ones_are_refused(fake_server, tmp_path, carrier, signum):
    closed = tmp_path / "closed"
    server = fake_server(closed=str(closed), settings={"server": carrier})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, server, scripted(reply="abcdefghij", delay=0.2), stream=True)
        wait_until(lambda: metric(server, "strata:requests_running") == 1)
        server.process.send_signal(signum)
        server.wait_for_line("draining")
        status, headers, body = post(server, "too late")
        assert status == 503 and int(headers["Retry-After"]) > 0 and "draining" in json.loads(body)["error"]["message"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(server, "/health")
        assert json.load(caught.value)["status"] == "draining"
        assert running.result()[2].decode().endswith("data: [DONE]\n\n")
    assert server.wait(20) == 0
    assert closed.read_text() == "closed" and "Traceback" not in server.log, server.log


def test_what_does_not_finish_in_the_drain_time_is_ended_with_an_error(fake_server):
    server = fake_server(settings={"drain_s": 0.5})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, server, scripted(reply=LONG, delay=0.1), stream=True)
        wait_until(lambda: metric(server, "strata:requests_running") == 1)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 10
        last, done, _ = running.result()[2].decode().split("\n\n")[-3:]
        assert json.loads(last[6:])["error"]["code"] == "overloaded" and done == "data: [DONE]"


def test_a_stop_while_loading_does_not_wait_for_the_model(fake_server):
    server = fake_server(wait=False, load_s=60)
    server.wait_for_line("reading weights")
    begun = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - begun < 10


@pytest.mark.parametrize("carrier", ["gunicorn", "waitress"])
def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_exit_code(fake_server, carrier):
    server = fake_server(wait=False, broken=True, settings={"server": carrier})
    assert server.wait(20) == 4
    assert "error: the file is broken" in server.log and "Traceback" not in server.log, server.log


def children(server):
    return psutil.Process(server.pid).children()


def test_a_crashed_worker_is_replaced_once_it_had_served(fake_server):
    server = fake_server()
    (worker,) = children(server)
    os.kill(worker.pid, signal.SIGKILL)
    server.wait_for_line("died and is started again")
    wait_until(lambda: server.log.count("ready at") == 2, 15)
    assert post(server, "again")[0] == 200
    assert server.stop() == 0


def test_a_worker_that_dies_while_loading_ends_the_server(fake_server):
    server = fake_server(wait=False, load_s=60)
    server.wait_for_line("reading weights")
    (worker,) = children(server)
    os.kill(worker.pid, signal.SIGKILL)
    assert server.wait(20) == 1 and "died" in server.log


def test_nothing_but_the_api_listens_and_there_is_one_worker(fake_server, tmp_path):
    server = fake_server()
    for signum in (signal.SIGTTIN, signal.SIGUSR2, signal.SIGWINCH):
        server.process.send_signal(signum)
    time.sleep(1.5)
    (worker,) = children(server)
    ports = {c.laddr.port for p in (psutil.Process(server.pid), worker) for c in p.net_connections("tcp")}
    assert ports == {urlsplit(server.url).port}
    sockets = [c for p in (psutil.Process(server.pid), worker) for c in p.net_connections("unix") if c.raddr or c.laddr]
    assert not [c for c in sockets if "gunicorn" in str(c.laddr)]
    assert post(server, "fine")[0] == 200


def test_a_taken_port_is_said_at_once(fake_server):
    server = fake_server()
    port = urlsplit(server.url).port
    code = (
        "from strata_core.server.runner import listen\n"
        "from strata_core.errors import SettingsError\n"
        f"try: listen('127.0.0.1', {port})\n"
        "except SettingsError as e: print(e.message, e.exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert f"cannot listen on 127.0.0.1:{port}" in done.stdout and done.stdout.rstrip().endswith(" 2")


def test_an_ipv6_address_is_served_and_printed_in_brackets(fake_server):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = fake_server(settings={"host": "::1"})
    assert server.url.startswith("http://[::1]:")
    assert post(server, "hi")[0] == 200


def test_keep_alive_connections_carry_several_requests(fake_server):
    server = fake_server()
    address = urlsplit(server.url)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=10)) as connection:
        first = None
        for _ in range(3):
            connection.request("POST", "/v1/chat/completions", body)
            first = first or connection.sock
            assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
            assert connection.sock is first


def test_many_threads_of_clients_get_their_own_replies(fake_server):
    server = fake_server(settings={"parallel": 4, "queue": 64})
    wrong = []

    def ask(i):
        for turn in range(5):
            status, _, body = post(server, scripted(reply=f"secret {i} {turn}"))
            if status != 200 or json.loads(body)["choices"][0]["message"]["content"] != f"secret {i} {turn}":
                wrong.append((i, turn, status, body))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert metric(server, "strata:requests_total") == {"stop": 60}


