"""What the measurements share: text, servers, a strict client, memory and processor time, and the table at the end."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import psutil
from rich.console import Console
from rich.table import Table

from strata_core.testing.server import LiveServer, serve

MIB = 1 << 20
#: The plugin of the disk levels, which would take what RAM gives up.
DISK = "tiers"

_SUBJECTS = (
    "The old keeper", "A young engineer", "My neighbour", "The second ship", "Every student", "The quiet town",
    "A careful doctor", "The northern road", "Our teacher", "The last train",
)  # fmt: skip
_VERBS = (
    "found", "repaired", "remembered", "painted", "measured", "carried", "described", "lost", "opened", "followed",
)  # fmt: skip
_OBJECTS = (
    "the green door", "a small lantern", "seven letters", "the broken clock", "an unknown river", "the morning paper",
    "a heavy wooden box", "the map of the harbour", "two silver keys", "the story of the flood",
)  # fmt: skip
_PLACES = (
    "before winter came", "near the bridge", "while it rained", "in the year 1897", "after a long silence",
    "without a word", "at the edge of the forest", "as everyone had hoped", "twice in one week", "behind the station",
)  # fmt: skip


def prose(seed: int, sentences: int) -> str:
    """English-like text, the same for the same seed, different from the first words on for others."""
    pick = random.Random(seed).choice
    lines = (f"{pick(_SUBJECTS)} {pick(_VERBS)} {pick(_OBJECTS)} {pick(_PLACES)}." for _ in range(sentences))
    return f"Chapter {seed}. " + " ".join(lines)


@contextmanager
def serving(*arguments: str) -> Iterator[LiveServer]:
    """A server that keeps conversations in RAM alone, stopped at the end.

    A traceback in its log, or another exit code than 0, is an error.
    """
    server = serve(*arguments, env={"STRATA_DISABLE_PLUGINS": DISK})
    try:
        yield server
    finally:
        code = server.stop()
    if code or "Traceback" in server.log:
        raise SystemExit(f"the server ended with {code}; it wrote:\n{server.log}")


@attrs.frozen
class Reply:
    """A streamed reply. Times in seconds since the request was sent; ``first_s`` is that of the first text, or of the
    end of a reply that has none."""

    text: str
    first_s: float
    total_s: float
    usage: dict[str, Any]
    ledger: dict[str, Any]

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def generated(self) -> int:
        return int(self.usage["completion_tokens"])


@attrs.define
class Client:
    """Speaks to one server. Safe to use from several threads: every call has its own connection."""

    url: str

    def call(self, method: str, path: str, body: object = None) -> Any:
        """A JSON reply. :raises RuntimeError: the status is not 200."""
        connection = self._connect()
        try:
            status, data = _exchange(connection, method, path, body)
            if status != 200:
                raise RuntimeError(f"{method} {path}: {status} {data.decode(errors='replace')}")
            return json.loads(data)
        finally:
            connection.close()

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", "/metrics?format=json")
        return found

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of ``text`` that is ``tokens`` tokens long."""
        ids = self.call("POST", "/tokenize", {"content": text})["tokens"]
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens, {tokens} are needed")
        return str(self.call("POST", "/detokenize", {"tokens": ids[:tokens]})["content"])

    def chat(self, messages: Sequence[dict[str, str]], **fields: Any) -> Reply:
        """A greedy chat reply, streamed. ``fields`` go into the request."""
        began = time.perf_counter()
        body = {
            "messages": list(messages), "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "strata": True, **fields,
        }  # fmt: skip
        texts: list[str] = []
        first = 0.0
        last: dict[str, Any] = {}
        with self.stream("/v1/chat/completions", body) as events:
            for event in events:
                delta = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if delta:
                    first = first or time.perf_counter() - began
                    texts.append(delta)
                last = event
        ledger = last["strata"]["requests"][0]
        total = time.perf_counter() - began
        return Reply("".join(texts), first or total, total, last["usage"], ledger)

    @contextmanager
    def stream(self, path: str, body: object) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a streamed reply; leaving the block hangs up, wherever the stream is."""
        connection = self._connect()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"POST {path}: {reply.status} {reply.read().decode(errors='replace')}")
            yield _events(reply)
        finally:
            connection.close()

    def leave(self, path: str, body: object) -> socket.socket:
        """Send a request and return its connection without reading the answer; closing it is hanging up."""
        data = json.dumps(body).encode()
        where = urllib.parse.urlsplit(self.url)
        sock = socket.create_connection((where.hostname, where.port or 80), timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=300)


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: object) -> tuple[int, bytes]:
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
    reply = connection.getresponse()
    return reply.status, reply.read()


def _events(lines: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Strict server-sent events: one ``data:`` line and an empty line each, comments, ``[DONE]`` and then the end.

    :raises RuntimeError: anything else, or an error event.
    """
    while True:
        line = lines.readline().decode()
        if not line:
            raise RuntimeError("the stream ended without [DONE]")
        if lines.readline() != b"\n":
            raise RuntimeError(f"no empty line after {line!r}")
        if line.startswith(":"):
            continue
        if not (line.startswith("data: ") and line.endswith("\n")):
            raise RuntimeError(f"not an event: {line!r}")
        data = line[len("data: ") : -1]
        if data == "[DONE]":
            if lines.read():
                raise RuntimeError("the stream goes on after [DONE]")
            return
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"error event: {event['error']}")
        yield event


def processes(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def rss(pid: int) -> int:
    """Bytes of resident memory of a process and all below it."""
    return sum(process.memory_info().rss for process in processes(pid))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it, which do not count waiting for other work on the machine."""
    return sum(sum(process.cpu_times()[:2]) for process in processes(pid))


@attrs.define
class PeakRSS:
    """Samples the memory of a process tree while the block runs; ``peak`` is the most it saw, in bytes."""

    pid: int
    peak: int = 0
    _done: threading.Event = attrs.field(factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PeakRSS:
        self._thread = threading.Thread(target=self._sample, name="rss", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, rss(self.pid))


@attrs.define
class Report:
    """Measurements beside their bars."""

    title: str
    _rows: list[tuple[str, str, str, bool | None]] = attrs.field(factory=list)

    def add(self, what: str, measured: object, bar: str = "", met: bool | None = None) -> None:
        """``met`` is None for what has no bar."""
        self._rows.append((what, str(measured), bar, met))

    def finish(self) -> int:
        """Print the table. The exit code: 1 when a bar was missed."""
        table = Table("measurement", "measured", "bar", "", title=self.title, title_justify="left")
        for what, measured, bar, met in self._rows:
            table.add_row(what, measured, bar, {None: "", True: "met", False: "MISSED"}[met])
        console = Console()
        # Without a terminal the width is a guess that would break the rows.
        console.print(table, width=None if console.is_terminal else 110)
        return int(any(met is False for *_, met in self._rows))
