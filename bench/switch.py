"""What it costs the engine to switch a slot between two parked conversations. No server, no thread.

    python bench/switch.py [--model NAME|FILE] [--backend NAME] [--tokens N] [--switches N]

Two conversations of N tokens share one slot in turns, so that every turn parks one and restores the other. Counted are
the time of the restore alone (`restore_s` of the request's record), that of all calls to the keeper (lookup, park,
restore, why-ledger) by the clock and by the processor time of the engine's thread, and copies of K/V between pages or
to and from a device. The bar is for processor time: the clock also counts other work on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import numpy as np
from support import DISK, Report

from strata_core.engine.core import EngineCore
from strata_core.engine.opening import assemble
from strata_core.engine.requests import Completion, Request, RequestHandle, Sampling
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings

COPIES = ("copy", "download", "upload")
#: First id that is no control token of any small model, tokens of a further turn, and of its reply.
FIRST_ID, NEW, REPLY = 64, 16, 4
KEEPER = ("query", "find", "hold", "park", "begin_restore", "finish_restore", "take", "release", "explain")


@attrs.define
class Watched:
    """Counts and times calls of methods of an object, by replacing them on it for a while."""

    calls: Counter[str] = attrs.field(factory=Counter)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @contextmanager
    def watching(self, target: Any, names: tuple[str, ...]) -> Iterator[None]:
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(target, name)  # the class's own is seen again

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.calls[name] += 1
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.thread_time() - cpu_began

        return call


def ask(core: EngineCore, prompt: np.ndarray, max_tokens: int) -> Completion:
    """Run one request to its end."""
    request = Request(prompt=prompt, sampling=Sampling(temperature=0), max_tokens=max_tokens, ignore_eos=True)
    handle = RequestHandle(request, lambda: None)
    core.waiting.append(handle)
    while core.step():
        core.deliver()
    core.deliver()
    return handle.result()


def switch(core: EngineCore, tokens: int, vocab: int, switches: int, report: Report) -> None:
    """Let two conversations take turns, and report what a turn costs beside computing."""
    random = np.random.default_rng(0)
    history = [random.integers(FIRST_ID, vocab, tokens).astype(np.int32) for _ in range(2)]
    restores, calls, busy, copied, lost = [], [], [], 0, 0
    for number in range(2 + switches):
        turn = number % 2
        prompt = np.concatenate([history[turn], random.integers(FIRST_ID, vocab, NEW).astype(np.int32)])
        keeper, copies = Watched(), Watched()
        with keeper.watching(core.keeper, KEEPER), ExitStack() as stack:
            for pool in core.keeper.pools:
                stack.enter_context(copies.watching(pool.store, COPIES))
            done = ask(core, prompt, REPLY)
        history[turn] = np.concatenate([prompt, np.array(done.tokens, np.int32)])
        if number < 2:
            continue  # both are read for the first time
        restores.append(1e3 * (done.record.restore_s or 0.0))
        calls.append(1e3 * keeper.seconds)
        busy.append(1e3 * keeper.cpu_seconds)
        copied += sum(copies.calls.values())
        # The last token of the turn before was sampled, not computed.
        lost += len(prompt) - NEW - 1 - done.started.cached_tokens
    held = len(history[0])
    report.add("tokens parked and restored in each switch, at last", held)
    report.add("computed tokens that were read again", lost, "0", lost == 0)
    report.add("copies of pages", copied, "0", copied == 0)
    for what, times, bar in (
        ("restore (restore_s)", restores, False),
        ("all calls to the keeper", calls, False),
        ("the same, engine's processor time", busy, True),
    ):
        middle = statistics.median(times)
        report.add(
            f"{what}, median (least), ms", f"{middle:.2f} ({min(times):.2f})", "<= 5" if bar else "",
            middle <= 5 if bar else None,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--tokens", type=int, default=2000, help="length of each conversation (default: 2000)")
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="1 suffers least from other work (default: 1)")
    args = parser.parse_args()

    settings = Settings(model=args.model, backend=args.backend, threads=args.threads, parallel=1)
    plugins = Plugins.load({"STRATA_DISABLE_PLUGINS": DISK})
    parts, options = assemble(settings, plugins, lambda what, fraction: None)
    core = EngineCore(
        parts.model, parts.tokenizer, parts.keeper, options, emit=parts.emit, ended=lambda record: None
    )
    report = Report(f"{args.switches} switches between two conversations of {args.tokens} tokens in one slot")
    try:
        switch(core, args.tokens, parts.model.geometry.vocab, args.switches, report)
    finally:
        core.close()
        parts.close()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
