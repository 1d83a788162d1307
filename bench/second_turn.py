"""A conversation's second turn with its K/V at hand, against a server that keeps nothing.

    python bench/second_turn.py [--model NAME|FILE] [--tokens N] [--pairs N] [--threads N] [serve options]

Every pair is a new conversation: a first turn of N tokens, then a short question. The second turn is sent to both
servers, one right after the other, in alternating order. Times are of other work on the machine too; their ratio in a
pair is less so, and the median of the pairs least.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import attrs
from support import Client, Reply, Report, prose, serving

QUESTION = "Thank you. Which of these sentences was the shortest?"


@attrs.frozen
class Pair:
    """One conversation: its first turn, and its second with and without reuse."""

    first: Reply
    cold_first: Reply
    warm: Reply
    cold: Reply

    @property
    def ratio(self) -> float:
        return self.warm.first_s / self.cold.first_s

    @property
    def new_tokens(self) -> int:
        """Tokens of the second prompt that were neither read nor generated in the first turn."""
        return self.warm.prompt - self.first.prompt - self.first.generated

    @property
    def short(self) -> int:
        """Tokens by which ``cached_tokens`` is below what it should be."""
        return max(0, self.warm.prompt - self.new_tokens - 1 - self.warm.cached)

    @property
    def same(self) -> bool:
        return (self.first.text, self.warm.text) == (self.cold_first.text, self.cold.text)


def measure(cached: Client, uncached: Client, seed: int, tokens: int) -> Pair:
    """Run one conversation on both servers."""
    text = cached.cut(prose(seed, tokens // 8), tokens)
    turns = [{"role": "user", "content": text}]
    first, cold_first = (client.chat(turns, max_tokens=24) for client in (cached, uncached))
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": QUESTION}]
    order = [cached, uncached] if seed % 2 else [uncached, cached]
    replies = {id(client): client.chat(turns, max_tokens=24) for client in order}
    return Pair(first, cold_first, replies[id(cached)], replies[id(uncached)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the first message (default: 1500)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", default="1", help="of each server; 1 suffers least from other work (default: 1)")
    args, further = parser.parse_known_args()

    common = ("--model", args.model, "--threads", args.threads, "--parallel", "1", *further)
    with serving(*common) as one, serving(*common, "--no-conversation-cache") as other:
        cached, uncached = Client(one.url), Client(other.url)
        for client in (cached, uncached):
            client.chat([{"role": "user", "content": "Hello"}], max_tokens=2)
        pairs = [measure(cached, uncached, seed, args.tokens) for seed in range(1, args.pairs + 1)]

    for pair in pairs:
        print(
            f"prompt {pair.warm.prompt} = {pair.warm.cached} cached + {pair.warm.prompt - pair.warm.cached} read "
            f"({pair.new_tokens} new); first text after {pair.warm.first_s:.3f} s, cold {pair.cold.first_s:.3f} s"
        )
    ratio = statistics.median(pair.ratio for pair in pairs)
    report = Report(f"second turn of a conversation of {args.tokens} tokens, {args.pairs} pairs")
    short, cold = max(pair.short for pair in pairs), max(pair.cold.cached for pair in pairs)
    report.add("cached_tokens below prompt - new - 1", short, "0", not short)
    report.add("cached_tokens without a cache", cold, "0", not cold)
    same = sum(pair.same for pair in pairs)
    report.add("conversations with the same replies as without", f"{same} of {len(pairs)}", "all", same == len(pairs))
    report.add("first text, cold, median", f"{statistics.median(p.cold.first_s for p in pairs):.3f} s")
    report.add("first text, second turn, median", f"{statistics.median(p.warm.first_s for p in pairs):.3f} s")
    report.add("second turn / cold, median of pairs", f"{ratio:.4f} (1/{1 / ratio:.0f})", "<= 1/10", ratio <= 0.1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
