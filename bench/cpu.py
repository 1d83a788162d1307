"""Speed of the cpu backend through the engine, in pairs with another program on the same file and threads.

    python bench/cpu.py [--model FILE] [--threads N] [--pairs N] [--peer PROGRAM]

The peer is any program that takes ``FILE --threads N --json`` and prints a JSON object with ``prefill_512``,
``prefill_2048``, ``decode_16``, ``decode_512`` and ``decode_2048``, each ``{"median": tokens per second}``. Both run in
turns, in processes of their own, because a machine's speed changes from minute to minute; only ratios of the same pair
are compared. Without a peer, Strata's own figures are printed.

Every figure of Strata is taken from the events of requests to an :class:`strata_core.engine.Engine`, sampling and
bookkeeping included. *Streaming* is the rate at which all threads together read memory: a token needs all weights once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Delta, Finished, Request, Sampling
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings
from strata_core.weights.catalogue import resolve
from strata_core.weights.gguf import GGUFFile

DECODED, SLOTS = 48, 4
#: Figure, unit, what at least and what is aimed at: ratios to the peer, or of the figure itself.
ROWS = (
    ("decode_16", "tok/s", 1.2, 1.6),
    ("decode_512", "tok/s", 1.2, 1.6),
    ("decode_2048", "tok/s", 1.2, 1.6),
    ("prefill_512", "tok/s", 1.5, 3.0),
    ("prefill_2048", "tok/s", 1.5, 3.0),
    ("slots_4", "x one slot", 2.5, 3.5),
    ("load", "s (at most)", 1.5, 0.7),
    ("streaming_share", "of streaming", 0.8, 0.95),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="a GGUF file or the name of an installed model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="the program to compare with")
    parser.add_argument("--one", action="store_true", help="print one run's figures as JSON")
    args = parser.parse_args()
    path = resolve(args.model)
    if args.one:
        print(json.dumps(measure(path, args.threads)))
        return
    threads = args.threads or psutil.cpu_count(logical=False) or 1
    own, peer = [], []
    for _ in range(args.pairs):
        own.append(run([__file__, "--one", "--model", str(path), "--threads", str(threads)]))
        if args.peer:
            peer.append(run([str(args.peer), str(path), "--threads", str(threads), "--json"]))
    report(own, peer)


def run(arguments: list[str]) -> dict[str, float]:
    """A program's figures, as one number each."""
    done = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {k: v["median"] if isinstance(v, dict) else v for k, v in found.items() if not isinstance(v, str)}


def measure(path: Path, threads: int) -> dict[str, float]:
    """One run of everything."""
    with GGUFFile.open(path) as source:
        weights = sum(tensor.nbytes for tensor in source.tensors.values())
    settings = Settings(model=str(path), threads=threads, parallel=SLOTS, backend="cpu", max_context=2304)
    began = time.perf_counter()
    with Engine.open(settings, Plugins.load()) as engine:
        figures = {"load": time.perf_counter() - began}
        random = np.random.default_rng(0)

        def prompt(length: int) -> NDArray[np.int32]:
            return random.integers(1000, 40000, length).astype(np.int32)

        intervals(engine, [prompt(64)])
        for length in (512, 2048):
            rates = [length / read_seconds(engine, prompt(length)) for _ in range(3)]
            figures[f"prefill_{length}"] = statistics.median(rates)
        for length in (16, 512, 2048):
            figures[f"decode_{length}"] = 1 / statistics.median(intervals(engine, [prompt(length)]))
        alone = statistics.median(intervals(engine, [prompt(16)]))
        together = statistics.median(intervals(engine, [prompt(16) for _ in range(SLOTS)]))
        figures["slots_4"] = SLOTS * alone / together
        rate = stream(threads)
        figures["streaming"] = rate / 1e9
        figures["streaming_share"] = weights / alone / rate
    return figures


def ask(prompt: NDArray[np.int32], tokens: int) -> Request:
    return Request(prompt=prompt, sampling=Sampling(temperature=0), max_tokens=tokens, ignore_eos=True, cache=False)


def read_seconds(engine: Engine, prompt: NDArray[np.int32]) -> float:
    """How long the engine read a prompt."""
    seconds = engine.submit(ask(prompt, 1)).result().record.read_s
    assert seconds is not None
    return seconds


def intervals(engine: Engine, prompts: list[NDArray[np.int32]]) -> list[float]:
    """Seconds between tokens of the last prompt's reply, while the others are generated too."""
    handles = [engine.submit(ask(prompt, DECODED + 8 * len(prompts))) for prompt in prompts]
    times = []
    for event in handles[-1].events():
        if isinstance(event, Delta) and event.tokens:
            times.append(time.perf_counter())
        elif not isinstance(event, Delta | Finished) and times:
            raise RuntimeError(f"the request ended with {event}")
    for handle in handles[:-1]:
        handle.result()
    return [b - a for a, b in itertools.pairwise(times)][:DECODED]


def stream(threads: int) -> float:
    """Bytes per second that ``threads`` threads read from memory, best of several tries."""
    parts = [np.full(96 << 17, 1, np.uint64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - began))
    return best


def report(own: list[dict[str, float]], peer: list[dict[str, float]]) -> None:
    table = Table("", "Strata", "peer", "ratio per pair", "at least", "aim")
    for name, unit, least, aim in ROWS:
        mine = [figures[name] for figures in own]
        theirs = [figures[name] for figures in peer if name in figures]
        ratios = "  ".join(f"{a / b:.2f}" for a, b in zip(mine, theirs, strict=False))
        shown = f"{statistics.median(theirs):.3g}" if theirs else ""
        table.add_row(f"{name} {unit}", f"{statistics.median(mine):.3g}", shown, ratios, f"{least:g}", f"{aim:g}")
    console = Console()
    console.print(table)
    console.print(f"streaming: {statistics.median(figures['streaming'] for figures in own):.1f} GB/s")


if __name__ == "__main__":
    main()
