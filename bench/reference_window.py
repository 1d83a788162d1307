"""The reference window: 50 minutes of agents whose conversations do not fit into memory, with and without spilling.

    python bench/reference_window.py [--plot FILE.svg]

Eight agents take turns on four slots of a 16 GB host. Their conversations are of about 100,000 tokens, 1.6 to 2.9 GB of
K/V each, so that four fill the memory and parking one more in RAM is out of the question. Without a level below RAM
every switch gives a conversation up, and about two million tokens are read again; with one, none. Nothing is computed:
the engine's own decisions are replayed in simulated time, see docs/simulate.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support import Report

from strata_core.cli.tables import print_table
from strata_core.engine.plan import plan_memory
from strata_core.settings import Settings
from strata_core.simulate.config import MIB, Changes, SimConfig
from strata_core.simulate.generate import Agents, agents_trace
from strata_core.simulate.replay import Replay
from strata_core.simulate.report import svg_plot, table
from strata_core.simulate.trace import Trace, read_trace

WINDOW_S = 3000.0
#: K/V of a token: 12 layers of full attention, 2 heads of 256 for K and for V, f16.
TOKEN_BYTES = 12 * 2 * 2 * 256 * 2
#: What a 16 GB host has left for pages, beside the system; weights are held elsewhere.
HOST_MIB = 15 * 1024
#: Prompt tokens a second of a mixture of experts on such a host, and generated ones per slot.
READ_RATE, GENERATE_RATE = 900.0, 20.0

AGENTS = Agents(
    agents=8, rounds=20, system=4000, first=78_000, spread=0.2, grow=700, reply=300, gap_s=110, stagger_s=5,
    token_bytes=TOKEN_BYTES, parallel=4,
)  # fmt: skip


def planned(trace: Trace) -> SimConfig:
    """The window's server, its RAM shared out as a start with these settings would."""
    base = SimConfig.of_trace(trace)
    plan = plan_memory(
        Settings(parallel=base.parallel, max_context=base.max_context, page_tokens=base.page_tokens),
        block_bytes=base.page_bytes,
        model_context=base.max_context,
        available=HOST_MIB * MIB,
        host_available=HOST_MIB * MIB,
        host_memory=True,
    )
    for note in plan.notes:
        print(note)
    changes = Changes(
        label="without spilling", host_mib=HOST_MIB, ram_mib=plan.ram_budget // MIB, read_rate=READ_RATE,
        generate_rate=GENERATE_RATE,
    )  # fmt: skip
    return changes.apply(base)


def gigabytes(trace: Trace) -> tuple[float, float]:
    """Size of the smallest conversation at its beginning, and of the largest in the end."""
    sizes = [item.computed * TOKEN_BYTES / 1e9 for item in trace.items]
    return min(sizes), max(sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the plot to an SVG file")
    args = parser.parse_args()

    trace = read_trace(agents_trace(AGENTS))
    without = planned(trace)
    spilling = Changes(label="with spilling", cold_mib=64 * 1024, park="auto").apply(without)
    outcomes = [Replay(trace, config).run(WINDOW_S) for config in (without, spilling)]
    if args.plot is not None:
        args.plot.write_text(svg_plot(outcomes), encoding="utf-8")
    print_table(*table(outcomes))

    lost, kept = (outcome.reread_tokens for outcome in outcomes)
    small, large = gigabytes(trace)
    report = Report(f"{AGENTS.agents} agents on {AGENTS.parallel} slots, {WINDOW_S / 60:.0f} minutes")
    sized = small >= 1.55 and large <= 2.95
    report.add("conversations", f"{small:.1f} to {large:.1f} GB", "1.6 to 2.9 GB", sized)
    report.add("read again without spilling", f"{lost:,} tokens", "about 2 M", 1_700_000 <= lost <= 2_300_000)
    report.add("read again with spilling", f"{kept:,} tokens", "0", not kept)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
