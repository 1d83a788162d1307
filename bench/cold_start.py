"""From the start of the process to the first token, on a warm disk, phase by phase.

    python bench/cold_start.py [--model NAME|FILE] [--starts N] [--threads N] [serve options]

Starts `strata serve` several times and asks for one token as soon as it is ready. Phases are told by the lines that the
server writes. The bar is for the clock; processor time (user and system, of all its processes) is beside it, since it
does not count what other work on the machine delays.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import attrs
from support import Client, Report, cpu_seconds

from strata_core.testing.server import STRATA, LiveServer, launch

#: What the server writes when a phase begins, and what is done in the phase that this line ends.
MARKS = (
    (r"strata serve: opening the model", "interpreter, imports, plugins, checks, fork"),
    (r"strata serve: loading weights", "model file's header, tokenizer, template"),
    (r"strata serve: planning memory", "weights"),
    (r"strata serve: ready at (\S+)", "page pool, identity, levels"),
)
FIRST_TOKEN = "first token of a chat reply"


@attrs.define
class Clock:
    """Seconds since the last mark, by the clock and by the processor."""

    server: LiveServer
    wall: float
    cpu: float = 0.0

    def mark(self) -> tuple[float, float]:
        now, cpu = time.perf_counter(), cpu_seconds(self.server.pid)
        spent = now - self.wall, cpu - self.cpu
        self.wall, self.cpu = now, cpu
        return spent


def start(arguments: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Seconds by the clock and of the processor, by phase, of one start."""
    began = time.perf_counter()
    server = launch((*STRATA, "serve", "--port", "0", *arguments))
    try:
        clock = Clock(server, began)
        phases = {}
        for pattern, phase in MARKS:
            found = server.wait_for_line(pattern, 120)
            phases[phase] = clock.mark()
        Client(found[1]).chat([{"role": "user", "content": "Hello"}], max_tokens=1)
        phases[FIRST_TOKEN] = clock.mark()
        return phases
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--threads", default="0", help="of the server; 0: as many as it takes by itself (default)")
    args, further = parser.parse_known_args()

    arguments = ("--model", args.model, "--threads", args.threads, *further)
    start(arguments)  # the disk is warm from here on
    starts = [start(arguments) for _ in range(args.starts)]
    report = Report(f"process start to first token, medians of {args.starts}: clock / processor time, s")
    for phase in starts[0]:
        wall, cpu = (statistics.median(one[phase][kind] for one in starts) for kind in (0, 1))
        report.add(phase, f"{wall:.2f} / {cpu:.2f}")
    walls, cpus = ([sum(spent[kind] for spent in one.values()) for one in starts] for kind in (0, 1))
    wall = statistics.median(walls)
    report.add("start to first token", f"{wall:.2f} / {statistics.median(cpus):.2f}", "<= 5", wall <= 5)
    report.add("the quickest start", f"{min(walls):.2f} / {min(cpus):.2f}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
