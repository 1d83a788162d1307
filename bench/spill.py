"""What writing conversations to disk costs others: the time between a stream's tokens, and memory.

    python bench/spill.py [--model NAME|FILE] [--backend NAME] [--tokens N] [--spills N]

*Tokens*: one slot generates while a parked conversation of N tokens is written to the cold level, again and again, with
as much time between writes as each takes. The 99th percentile of the time between two tokens during the writes is
compared with that between them; the bar is 1.25 times.

*Memory*: two conversations of N tokens change places on one slot, in a process of its own without any cache and in
one that keeps them on disk only. The peak of anonymous memory (RssAnon, every 0.1 s) may differ by at most 48 MiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from support import Report

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Delta, Request, Sampling
from strata_core.plugins import Plugins
from strata_core.settings.resolve import resolve

#: First id that is no control token of any small model.
FIRST_ID = 64
MIB = 1 << 20


def open_engine(args: argparse.Namespace, folder: str, **settings: object) -> Engine:
    plugins = Plugins.load()
    values = {
        "model": args.model, "backend": args.backend, "max_context": args.tokens + 1024,
        "conversation_cache_cold_dir": folder, "conversation_cache_min_free_mib": "256", **settings,
    }  # fmt: skip
    found = resolve(plugins.settings(), command_line=values, environ={}, config=None)
    return Engine.open(found, plugins)


def request(prompt: np.ndarray, max_tokens: int) -> Request:
    return Request(prompt=prompt, sampling=Sampling(temperature=0), max_tokens=max_tokens, ignore_eos=True)


def prompt(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(FIRST_ID, 10_000, count).astype(np.int32)


def tokens_beside_writes(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(args, folder, parallel=2, conversation_cache_spill_on="evict")
        try:
            engine.submit(request(prompt(1, args.tokens), 2)).result()
            engine.call(lambda core: core.park_all("switch"))
            during, between, writes = _stream(engine, args)
        finally:
            engine.close()
    p99 = [float(np.percentile(times, 99)) for times in (during, between)]
    medians = [float(np.median(times)) for times in (during, between)]
    seconds, nbytes = (float(np.median([write[part] for write in writes])) for part in (0, 1))
    report.add("writes", f"{len(writes)} of {nbytes / MIB:.0f} MiB, {1e3 * seconds:.0f} ms each")
    report.add("between tokens, median", f"{1e3 * medians[1]:.2f} ms, during writes {1e3 * medians[0]:.2f} ms")
    ratio = p99[0] / p99[1]
    report.add("99th percentile during writes", f"{ratio:.2f} x of {1e3 * p99[1]:.2f} ms", "1.25 x", ratio <= 1.25)


def _stream(engine: Engine, args: argparse.Namespace) -> tuple[list[float], list[float], list[tuple[float, int]]]:
    """Times between tokens during writes and between them, and what each write took: seconds and bytes."""
    handle = engine.submit(request(prompt(2, 64), 900))
    during: list[float] = []
    between: list[float] = []
    writes: list[tuple[float, int]] = []
    last = None
    began: float | None = None
    quiet_until = time.monotonic() + 1.0
    while len(writes) < args.spills and (event := handle.next_event(timeout=30)) is not None:
        if not isinstance(event, Delta):
            continue
        now = time.monotonic()
        if last is not None:
            (between if began is None else during).append(now - last)
        last = now
        if began is None and now >= quiet_until:
            engine.call(_write)
            began = time.monotonic()
        elif began is not None and engine.call(_written):
            writes.append((time.monotonic() - began, engine.call(_forget)))
            quiet_until, began = time.monotonic() + writes[-1][0], None
    handle.cancel()
    if len(writes) < args.spills:
        raise SystemExit(f"the stream ended after {len(writes)} writes; take fewer with --spills")
    return during, between, writes


def _parked(core: Any) -> Any:
    return next(iter(core.keeper.ladder.ram.entries()))


def _write(core: Any) -> None:
    core.keeper.parking.write_now(_parked(core))


def _written(core: Any) -> bool:
    [level] = core.keeper.ladder.below
    return not level.busy()


def _forget(core: Any) -> int:
    [level] = core.keeper.ladder.below
    nbytes: int = level.usage().bytes
    for entry in list(level.entries()):
        level.remove(entry)
    return nbytes


def memory_of(args: argparse.Namespace, mode: str) -> float:
    """Peak RssAnon in MiB while two conversations change places, in a process of its own."""
    command = [sys.executable, __file__, "--model", args.model, "--backend", args.backend]
    command += ["--tokens", str(args.tokens), "--in-mode", mode]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak: float = json.loads(out.splitlines()[-1])["peak_mib"]
    return peak


def change_places(args: argparse.Namespace) -> None:
    modes = {"none": {"conversation_cache": False}, "disk-only": {"conversation_cache_disk_only": True}}
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            for line in Path("/proc/self/status").read_text("ascii").splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)

    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(args, folder, parallel=1, **modes[args.in_mode])
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            texts = [prompt(seed, args.tokens) for seed in (1, 2)]
            for turn in range(6):
                reply = engine.submit(request(texts[turn % 2], 2)).result()
                texts[turn % 2] = np.concatenate([texts[turn % 2], reply.tokens, prompt(turn, 20)]).astype(np.int32)
        finally:
            done.set()
            watcher.join()
            engine.close()
    print(json.dumps({"peak_mib": peak / MIB}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--spills", type=int, default=12)
    parser.add_argument("--in-mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_mode:
        change_places(args)
        return 0
    report = Report("What writing conversations costs others")
    tokens_beside_writes(args, report)
    peaks = [memory_of(args, mode) for mode in ("none", "disk-only")]
    more = peaks[1] - peaks[0]
    report.add("peak anonymous memory", f"{peaks[0]:.0f} MiB without a cache, {peaks[1]:.0f} MiB with disk only")
    report.add("more with disk only", f"{more:.0f} MiB", "48 MiB", more <= 48)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
