"""Three agents with long contexts take turns on one slot, before and after a restart, in every mode of keeping.

    python bench/agents.py [--model NAME|FILE] [--modes none,ram,disk,disk-only] [--tokens N] [--rounds N]
                           [--rounds-after N] [serve options]

``none`` reuses nothing, ``ram`` keeps conversations in memory alone, ``disk`` parks to disk, ``disk-only`` has no
budget in RAM at all. With a disk mode every turn but each agent's first must resume, also after the restart; its prompt
must take at most an eighth of the time that ``none`` takes (medians); and its replies must be those of ``none``, which
the numpy backend promises (``--backend numpy``, the default here).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
from support import Client, Reply, Report, prose

from strata_core.testing.server import serve

AGENTS = 3
REPLY = 16
MODES = {
    "none": ("--no-conversation-cache",),
    "ram": ("--conversation-cache-cold-mib", "0"),
    "disk": ("--conversation-cache-park", "disk"),
    "disk-only": ("--conversation-cache-disk-only",),
}


@attrs.define
class Agent:
    """One agent's conversation, as its client keeps it."""

    seed: int
    messages: list[dict[str, str]]
    replies: list[Reply] = attrs.field(factory=list)

    def turn(self, client: Client) -> Reply:
        if self.replies:
            question = prose(1000 * self.seed + len(self.replies), 10 + 4 * self.seed)
            self.messages += [
                {"role": "assistant", "content": self.replies[-1].text},
                {"role": "user", "content": question},
            ]
        self.replies.append(client.chat(self.messages, max_tokens=REPLY))
        return self.replies[-1]


def run(mode: str, args: argparse.Namespace, rest: Sequence[str]) -> list[Agent]:
    """All rounds of one mode; conversations begin with the same texts in every mode."""
    agents: list[Agent] = []
    with tempfile.TemporaryDirectory() as folder:
        common = (
            "--model", args.model, "--backend", args.backend, "--parallel", "1",
            "--conversation-cache-cold-dir", str(Path(folder) / "cold"), *MODES[mode], *rest,
        )  # fmt: skip
        for rounds in (args.rounds, args.rounds_after):
            server = serve(*common)
            client = Client(server.url)
            if not agents:
                agents = [_agent(client, seed, args.tokens * (2 + seed) // 2) for seed in range(AGENTS)]
            for _ in range(rounds):
                for agent in agents:
                    reply = agent.turn(client)
                    print(
                        f"{mode:9} agent {agent.seed} turn {len(agent.replies)}: prompt {reply.prompt}, "
                        f"cached {reply.cached}, first token after {reply.first_s:.2f} s",
                        flush=True,
                    )
            code = server.stop()
            if code or "Traceback" in server.log:
                raise SystemExit(f"the server ended with {code}; it wrote:\n{server.log}")
    return agents


def _agent(client: Client, seed: int, tokens: int) -> Agent:
    return Agent(seed, [{"role": "user", "content": client.cut(prose(seed, tokens // 8), tokens)}])


def later(agents: Sequence[Agent]) -> list[tuple[Reply, Reply]]:
    """Every turn but the first of each agent, with the one before it."""
    return [(agent.replies[i - 1], agent.replies[i]) for agent in agents for i in range(1, len(agent.replies))]


def resumed(agents: Sequence[Agent]) -> int:
    """Turns that reused all that was computed in the turn before, less the page that a reply may re-tokenise in."""
    return sum(reply.cached >= before.prompt - 32 for before, reply in later(agents))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=1500, help="of the first agent's first prompt; others have more")
    parser.add_argument("--rounds", type=int, default=3, help="before the restart")
    parser.add_argument("--rounds-after", type=int, default=2, help="after the restart")
    args, rest = parser.parse_known_args()
    modes = args.modes.split(",")
    results = {mode: run(mode, args, rest) for mode in modes}
    report = Report("Agents taking turns")
    none = results.get("none")
    base = statistics.median(reply.first_s for _, reply in later(none)) if none else None
    for mode, agents in results.items():
        turns = later(agents)
        seconds = statistics.median(reply.first_s for _, reply in turns)
        if mode == "none":
            report.add(f"{mode}: first token of later turns, median", f"{seconds:.2f} s")
            continue
        whole = mode != "ram"
        report.add(
            f"{mode}: later turns that resumed", f"{resumed(agents)} of {len(turns)}", "all" if whole else "",
            resumed(agents) == len(turns) or not whole,
        )  # fmt: skip
        if base is not None and none is not None:
            ratio = seconds / base
            report.add(f"{mode}: first token, against none", f"{ratio:.3f}", "<= 0.125", ratio <= 0.125 or not whole)
            same = sum(a.text == b.text for (_, a), (_, b) in zip(turns, later(none), strict=True))
            report.add(f"{mode}: replies equal to none", f"{same} of {len(turns)}", "all", same == len(turns))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
