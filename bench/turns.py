"""Four conversations take turns on two slots, with RAM room for four, two and one of them parked.

    python bench/turns.py [--model NAME|FILE] [--tokens N] [--rounds N] [--threads N] [serve options]

With room enough, every turn from the second round on must resume: no token is read that was computed before. With less
room, what was computed before and is read again must be in the request's ledger, token by token, with the reason; the
conversations that vanish from /v1/conversations must be exactly those that the counter of evictions counts. Resident
memory is sampled throughout: it may grow by the RAM budget, the pages of the slots and two chunks of the page pool.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import attrs
from support import MIB, Client, PeakRSS, Reply, Report, prose, rss, serving

NAMES = "ABCD"
SLOTS = 2
REPLY, QUESTION = 12, "And what happened after that? Please tell me more."
#: Most tokens that a turn adds: reply, question and the template's own.
TURN = REPLY + 32
CHUNK = 32 * MIB


@attrs.frozen
class Turn:
    """A turn as the client saw it.

    :ivar lost: tokens computed in earlier turns of this conversation that were not reused.
    :ivar gone: names of conversations that this turn drove out.
    """

    name: str
    number: int
    reply: Reply
    lost: int
    gone: str

    @property
    def source(self) -> str:
        return "+".join(self.reply.ledger["reused"]) or "none"

    @property
    def reread(self) -> str:
        return ", ".join(f"{item['tokens']} ({item['reason']})" for item in self.reply.ledger["reread"]) or "0"

    @property
    def explained(self) -> bool:
        """Whether the ledger says what the client can work out, and calls evictions by their name."""
        told = self.reply.ledger["reread"]
        return sum(i["tokens"] for i in told) == self.lost and all(i["reason"].startswith("evicted") for i in told)


@attrs.define
class Talk:
    """Four conversations with one server, told apart by the ids that it lists for them."""

    client: Client
    messages: dict[str, list[dict[str, str]]]
    turns: list[Turn] = attrs.field(factory=list)
    fullest: int = 0
    _ids: dict[str, str] = attrs.field(factory=dict)

    def turn(self, name: str) -> None:
        before = [turn for turn in self.turns if turn.name == name]
        if before:
            self.messages[name] += [
                {"role": "assistant", "content": before[-1].reply.text},
                {"role": "user", "content": QUESTION},
            ]
        reply = self.client.chat(self.messages[name], max_tokens=REPLY)
        # The last token of a reply was sampled, not computed.
        computed = before[-1].reply.prompt + before[-1].reply.generated - 1 if before else 0
        slot = self.client.call("GET", "/slots")[reply.ledger["slot"]]
        self._ids = {key: value for key, value in self._ids.items() if value != name} | {slot["conversation"]: name}
        kept = {item["id"] for item in self.client.call("GET", "/v1/conversations")["data"]}
        gone = sorted(self._ids.pop(key) for key in list(self._ids) if key not in kept)
        # The conversation that just spoke had gone before if it had to be read again under a new id.
        self.turns.append(Turn(name, len(before) + 1, reply, max(0, computed - reply.cached), "".join(gone)))
        self.fullest = max(self.fullest, self.client.metrics()["strata:parked_bytes"])


def measure(report: Report, common: Sequence[str], room: int, budget: int, args: argparse.Namespace) -> None:
    """All turns on one server with a budget of ``budget`` MiB, which holds ``room`` parked conversations."""
    with serving(*common, "--conversation-cache-mib", str(budget)) as server:
        client = Client(server.url)
        # Rows of the longest step, so that what computing takes is part of the baseline.
        text = client.cut(prose(99, args.tokens), args.tokens + 128)
        client.chat([{"role": "user", "content": text}], max_tokens=2, strata_cache=False)
        page_bytes = client.call("GET", "/props")["engine"]["page_bytes"]
        texts = {name: client.cut(prose(ord(name), args.tokens), args.tokens) for name in NAMES}
        talk = Talk(client, {name: [{"role": "user", "content": text}] for name, text in texts.items()})
        baseline = rss(server.pid)
        with PeakRSS(server.pid) as memory:
            for _ in range(args.rounds):
                for name in NAMES:
                    talk.turn(name)
        evictions = int(client.metrics()["strata:evictions_total"])
        if args.log:
            print("".join(line for line in server.lines if "conversation cache" in line or " reused (" in line))

    for turn in talk.turns:
        driven = f"; evicted {', '.join(turn.gone)}" if turn.gone else ""
        print(
            f"room for {room}: {turn.name}{turn.number}: prompt {turn.reply.prompt} = {turn.reply.cached} cached "
            f"({turn.source}) + {turn.reply.prompt - turn.reply.cached} read; read again {turn.reread}{driven}"
        )
    later = [turn for turn in talk.turns if turn.number > 1]
    lost = sum(turn.lost for turn in later)
    what = f"room for {room} ({budget} MiB):"
    fits = room + SLOTS >= len(NAMES)
    report.add(f"{what} tokens computed before and read again", lost, "0" if fits else "", lost == 0 if fits else None)
    unexplained = sum(not turn.explained for turn in later)
    report.add(f"{what} turns whose ledger is wrong", unexplained, "0", not unexplained)
    gone = sum(len(turn.gone) for turn in talk.turns)
    report.add(f"{what} evictions seen / counted", f"{gone} / {evictions}", "equal", gone == evictions)
    over = talk.fullest - budget * MIB
    report.add(f"{what} parked at most, MiB", f"{talk.fullest / MIB:.1f}", f"<= {budget}", over <= 0)
    live = SLOTS * -(-(args.tokens + 64 + args.rounds * TURN) // 32) * page_bytes
    limit = budget * MIB + live + 2 * CHUNK
    grown = memory.peak - baseline
    report.add(f"{what} memory grown by, MiB", f"{grown / MIB:.0f}", f"<= {limit / MIB:.0f}", grown <= limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=300, help="length of each first message (default: 300)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", default="1", help="of the server; 1 suffers least from other work (default: 1)")
    parser.add_argument("--log", action="store_true", help="also print what the server said")
    args, further = parser.parse_known_args()

    common = ("--model", args.model, "--threads", args.threads, "--parallel", str(SLOTS), *further)
    with serving(*common) as server:
        facts = Client(server.url).call("GET", "/props")["engine"]
    pages = -(-(args.tokens + 64 + args.rounds * TURN) // facts["page_tokens"])
    # A conversation at the end, its token ids and its entry in the level's account.
    conversation = pages * (facts["page_bytes"] + facts["page_tokens"] * 4 + 16) + 4096
    report = Report(f"{len(NAMES)} conversations of {args.tokens} tokens, {args.rounds} rounds, {SLOTS} slots")
    for room in (4, 2, 1):
        measure(report, common, room, -(-room * conversation // MIB), args)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
