"""One-shot prompts, clients that hang up and cancelled waiting requests, while two streams go on.

    python bench/soak.py [--model NAME|FILE] [--one-shots N] [--hang-ups N] [--cancels N] [--budget MIB] [serve options]

Without --model a tiny random one is served. When everything is over, the two streams must have got the text that they
get undisturbed; resident memory must be what it was before, but for what is left of the RAM budget and one chunk of the
page pool; open files must be as many as before, and threads within the bound of the server's pool; and when all
conversations are deleted, no page of the pool may be in use.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import psutil
from support import MIB, Client, PeakRSS, Report, processes, prose, rss, serving

from strata_core.testing.server import LiveServer
from strata_core.testing.tiny import tiny_llama

PARALLEL, QUEUE, CLIENTS = 4, 64, 8
#: Requests that wait to be cancelled at the same time: two places are left for the streams that go on.
MOST_WAITING = QUEUE - PARALLEL - 2
#: Threads of the server's pool, and those of its processes beside it.
MOST_THREADS = PARALLEL + QUEUE + 16 + 12
CHUNK = 32 * MIB
#: What allocators, thread stacks and buffers of sockets may hold beyond what they held when the baseline was taken.
SLACK = 8 * MIB


def body(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion of exactly ``max_tokens`` tokens."""
    return {"prompt": text, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def listen(client: Client, request: dict[str, Any]) -> str:
    """The whole text of a streamed completion."""
    with client.stream("/v1/completions", {**request, "stream": True}) as events:
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@attrs.define
class Witness:
    """A stream that is asked for again and again while other things happen, and what was wrong with its texts."""

    client: Client
    request: dict[str, Any]
    wanted: str = ""
    heard: int = 0
    wrong: list[str] = attrs.field(factory=list)
    _over: threading.Event = attrs.field(factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Witness:
        self.wanted = listen(self.client, self.request)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                text = listen(self.client, self.request)
            except (OSError, RuntimeError) as error:
                text = f"{type(error).__name__}: {error}"
            self.heard += 1
            if text != self.wanted:
                self.wrong.append(text)


@attrs.define
class Soak:
    """The three kinds of disturbance. Prompts are never the same twice."""

    client: Client
    reply: int
    _seeds: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1000))

    def text(self) -> str:
        return prose(next(self._seeds), 6)

    def one_shots(self, count: int) -> None:
        """Prompts that nothing comes back to."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for reply in pool.map(lambda _: self.client.call("POST", "/v1/completions", self._short()), range(count)):
                if reply["usage"]["completion_tokens"] != 4:
                    raise RuntimeError(f"not a whole reply: {reply}")

    def _short(self) -> dict[str, Any]:
        return body(self.text(), 4)

    def hang_ups(self, count: int) -> None:
        """Clients that leave a stream: some before its first event, some after a few."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._hang_up, range(count)))

    def _hang_up(self, number: int) -> None:
        request = body(self.text(), self.reply, stream=True)
        with self.client.stream("/v1/completions", request) as events:
            for _ in range(number % 5):
                next(events)

    def cancels(self, count: int) -> None:
        """Requests whose clients leave while they wait for a slot; never more than the queue takes."""
        while count:
            batch = min(count, MOST_WAITING)
            fillers = [self.client.leave("/v1/completions", self._endless()) for _ in range(PARALLEL)]
            wait_for(lambda: self.client.metrics()["strata:requests_running"] == PARALLEL, "all slots are taken")
            waiting = [self.client.leave("/v1/completions", self._endless()) for _ in range(batch)]
            wait_for(lambda n=batch: self.client.metrics()["strata:requests_queued"] >= n, "requests wait")
            before = self.client.metrics()["strata:requests_cancelled_total"]
            for sock in waiting:
                sock.close()
            wait_for(
                lambda n=before + batch: self.client.metrics()["strata:requests_cancelled_total"] >= n, "they are gone"
            )
            for sock in fillers:
                sock.close()
            count -= batch

    def _endless(self) -> dict[str, Any]:
        return body(self.text(), self.reply, stream=True)


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    """:raises RuntimeError: it did not come true in ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)


@attrs.frozen
class Held:
    """What a server's processes hold."""

    rss: int
    threads: int
    files: int

    @classmethod
    def of(cls, server: LiveServer) -> Held:
        found = processes(server.pid)
        return cls(rss(server.pid), sum(p.num_threads() for p in found), sum(_files(p) for p in found))


def _files(process: psutil.Process) -> int:
    # Handles are what Windows has instead of descriptors.
    return int(process.num_fds() if psutil.POSIX else process.num_handles())


def idle(client: Client) -> bool:
    now = client.metrics()
    return not (now["strata:requests_running"] or now["strata:requests_queued"])


def run(server: LiveServer, args: argparse.Namespace, report: Report) -> None:
    client = Client(server.url)
    soak = Soak(client, args.reply)
    # So that the baseline has what the first requests allocate.
    soak.hang_ups(3 * CLIENTS)
    soak.one_shots(3 * CLIENTS)
    wait_for(lambda: idle(client), "the server is idle")
    parked = client.metrics()["strata:parked_bytes"]
    before = Held.of(server)
    witnesses = [Witness(client, body(f"{prose(number, 3)} Then", args.reply)) for number in (1, 2)]
    with PeakRSS(server.pid) as memory, witnesses[0], witnesses[1]:
        soak.one_shots(args.one_shots)
        soak.hang_ups(args.hang_ups)
        soak.cancels(args.cancels)
    wait_for(lambda: idle(client), "the server is idle")
    after = Held.of(server)
    full = client.metrics()
    for item in {found["id"]: found for found in client.call("GET", "/v1/conversations")["data"]}.values():
        client.call("DELETE", f"/v1/conversations/{item['id']}")
    left = client.metrics()["strata:pool_pages_used"]

    heard, wrong = sum(w.heard for w in witnesses), sum(len(w.wrong) for w in witnesses)
    report.add("other streams' texts, wrong / heard", f"{wrong} / {heard}", "0", not wrong and heard > 1)
    # Those of the warm-up and the ones that held the slots while others waited were cancelled as well.
    batches = -(-args.cancels // MOST_WAITING)
    gone = 3 * CLIENTS + args.hang_ups + args.cancels + PARALLEL * batches
    counted = int(full["strata:requests_cancelled_total"])
    # A short reply of a fast model may be whole before its client hangs up; those that waited cannot be.
    certain = gone - 3 * CLIENTS - args.hang_ups
    met = certain <= counted <= gone
    report.add("cancelled requests, sent / counted", f"{gone} / {counted}", f"{certain} to {gone}", met)
    report.add("parked at the end, MiB", f"{full['strata:parked_bytes'] / MIB:.1f}", f"<= {args.budget}",
               full["strata:parked_bytes"] <= args.budget * MIB)  # fmt: skip
    allowed = args.budget * MIB - parked + CHUNK + SLACK
    for what, grown in (("at most", memory.peak - before.rss), ("at the end", after.rss - before.rss)):
        met = grown <= allowed
        report.add(f"memory grown {what}, MiB", f"{grown / MIB:.1f}", f"<= {allowed / MIB:.0f}", met)
    report.add("pages in use when all is deleted", int(left), "0", not left)
    bounded = after.threads <= MOST_THREADS
    report.add("threads, before -> after", f"{before.threads} -> {after.threads}", f"<= {MOST_THREADS}", bounded)
    closed = after.files <= before.files
    report.add("open files, before -> after", f"{before.files} -> {after.files}", "no more", closed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="NAME or FILE; a tiny random model if not given")
    parser.add_argument("--one-shots", type=int, default=200)
    parser.add_argument("--hang-ups", type=int, default=100)
    parser.add_argument("--cancels", type=int, default=50)
    parser.add_argument("--reply", type=int, default=200, help="tokens of the streams (default: 200)")
    parser.add_argument("--budget", type=int, default=16, help="MiB of RAM for parked conversations (default: 16)")
    parser.add_argument("--threads", default="1", help="of the server; 1 suffers least from other work (default: 1)")
    args, further = parser.parse_known_args()

    title = f"{args.one_shots} one-shot prompts, {args.hang_ups} hang-ups, {args.cancels} cancelled waiting requests"
    report = Report(title)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(tiny_llama(Path(folder) / "tiny.gguf", layers=4, width=128, ffn=256, context=1024))
        options = (
            "--model", model, "--threads", args.threads, "--parallel", str(PARALLEL), "--queue", str(QUEUE),
            "--conversation-cache-mib", str(args.budget), "--max-context", "1024", *further,
        )  # fmt: skip
        with serving(*options) as server:  # it fails when there is a traceback in its log, or another exit code than 0
            run(server, args, report)
    report.add("tracebacks in the server's log", 0, "0", True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
