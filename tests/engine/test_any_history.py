"""Whatever clients do, replies equal those of an engine that reuses nothing, and no page is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver, ids, join
from foreseeing import foreseeing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from strata_core.engine import kept
from strata_core.engine.requests import RequestHandle
from strata_core.settings.core import BatchAgenda

#: How many histories each kind of model is tried with.
EXAMPLES = {
    "dense": dict(numpy=12, shadow=4),
    "window": dict(numpy=4, shadow=1),
    "hybrid": dict(numpy=4, shadow=1),
    "sparse": dict(numpy=3, shadow=1),
    "guessed": dict(numpy=3, shadow=1),
}


class Histories(RuleBasedStateMachine):
    """Clients that continue, repeat, edit, branch, cancel, pin and delete, on two slots and little RAM."""

    make: Any

    def __init__(self) -> None:
        super().__init__()
        self.engine: Driver = self.make(
            parallel=2, conversation_cache_slots=3, batch_agenda=BatchAgenda(chunk=9, budget=11, age=2)
        )
        self.engine.ram._max_bytes = 60 * 4096
        self.cold: Driver = self.make(parallel=1, conversation_cache=False)
        self.histories: list[np.ndarray] = [ids(seed, count=10) for seed in range(3)]
        self.running: list[tuple[RequestHandle, np.ndarray, str]] = []
        self.seed = 100

    def fresh(self, count: int) -> np.ndarray:
        self.seed += 1
        return ids(self.seed, count=count)

    @rule(which=st.integers(0, 5), new=st.integers(1, 25), tenant=st.sampled_from(["", "", "", "x"]), pin=st.booleans())
    def turn(self, which: int, new: int, tenant: str, pin: bool) -> None:
        history = self.histories[which % len(self.histories)]
        if len(history) > 300:
            history = history[:10]
        prompt = join(history, self.fresh(new))
        reply = self.engine.ask(prompt, max_tokens=3, tenant=tenant, pin=pin)
        assert reply.tokens == self.cold.ask(prompt, max_tokens=3).tokens
        self.histories[which % len(self.histories)] = join(prompt, reply.tokens)

    @rule(which=st.integers(0, 5))
    def again(self, which: int) -> None:
        prompt = self.histories[which % len(self.histories)]
        assert self.engine.ask(prompt, max_tokens=2).tokens == self.cold.ask(prompt, max_tokens=2).tokens

    @rule(which=st.integers(0, 5), cut=st.integers(1, 200), new=st.integers(1, 10))
    def edit(self, which: int, cut: int, new: int) -> None:
        history = self.histories[which % len(self.histories)]
        prompt = join(history[: max(1, cut % len(history))], self.fresh(new))
        assert self.engine.ask(prompt, max_tokens=2).tokens == self.cold.ask(prompt, max_tokens=2).tokens
        if len(self.histories) < 6:
            self.histories.append(prompt)

    @rule(which=st.integers(0, 5), new=st.integers(1, 60), tokens=st.integers(1, 6))
    def begin(self, which: int, new: int, tokens: int) -> None:
        prompt = join(self.histories[which % len(self.histories)], self.fresh(new))[-400:]
        self.running.append((self.engine.submit(prompt, max_tokens=tokens), prompt, ""))

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 6))
    def some_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def hang_up(self, which: int) -> None:
        handle, _, _ = self.running.pop(which % len(self.running))
        handle.cancel()

    @precondition(lambda self: self.running)
    @rule()
    def finish(self) -> None:
        self.engine.run()
        for handle, prompt, _ in self.running:
            reply = handle.result()
            assert reply.tokens == self.cold.ask(prompt, max_tokens=handle.request.max_tokens or 1).tokens
            assert reply.started.cached_tokens + reply.record.read_tokens == reply.started.prompt_tokens
        self.running.clear()

    @rule()
    def delete_one(self) -> None:
        for level in self.engine.core.keeper.ladder.levels:
            for entry in list(level.entries())[:1]:
                kept.delete(self.engine.core, entry.conversation) if not self._in_use(entry.conversation) else None

    @rule()
    def park_everything(self) -> None:
        self.engine.core.park_all("switch")

    @invariant()
    def the_budget_holds_and_is_the_weight_of_what_is_kept(self) -> None:
        usage = self.engine.ram.usage()
        assert usage.bytes == self.engine.ram.weigh(self.engine.ram.entries())
        assert usage.bytes <= usage.max_bytes
        assert usage.entries <= 3

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        live = sum(
            len(table) for slot in self.engine.core.slots if slot.live for table in slot.live.table.arrays(10**6)
        )
        assert self.engine.pages <= live + 3 * 60

    def _in_use(self, conversation: str) -> bool:
        return any(s.task and s.live and s.live.conversation == conversation for s in self.engine.core.slots)

    def teardown(self) -> None:
        self.engine.close()
        self.cold.close()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_any_history(driver: Any, backend: str, kind: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model = foreseeing("hybrid", tmp_path) if kind == "guessed" else tiny_models[kind]

    def make(**overrides: Any) -> Driver:
        own: dict[str, Any] = dict(model=str(model), prompt_cache_every=24)
        if kind == "guessed" and overrides.get("conversation_cache", True):
            own |= dict(mtp=2, lookup=2)
        return driver.undriven(**(own | overrides))  # type: ignore[no-any-return]

    machine = type("Machine", (Histories,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[kind][backend], stateful_step_count=25, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
