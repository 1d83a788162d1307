"""An engine driven step by step, without its thread."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from strata_core.engine.core import EngineCore
from strata_core.engine.requests import (
    Completion,
    Failed,
    Finished,
    Request,
    RequestHandle,
    RequestRecord,
    Sampling,
)
from strata_core.events import Event

#: First id that is not a control token of the tiny model, and the number of ids.
FIRST_ID, VOCABULARY = 3, 384
GREEDY = Sampling(temperature=0)


def ids(*seed: int, count: int) -> np.ndarray:
    """``count`` ordinary token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(FIRST_ID, VOCABULARY, count).astype(np.int32)


def join(*parts: np.ndarray | tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


@attrs.define(eq=False)
class Driver:
    """An engine core without its thread."""

    core: EngineCore
    parts: Any
    events: list[Event]
    records: list[RequestRecord]

    def submit(self, prompt: np.ndarray, **fields: Any) -> RequestHandle:
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("ignore_eos", True)
        handle = RequestHandle(Request(prompt=prompt, **fields), lambda: None)
        self.core.waiting.append(handle)
        return handle

    def step(self) -> bool:
        busy = self.core.step()
        self.core.deliver()
        return busy

    def run(self) -> None:
        while self.step():
            pass

    def ask(self, prompt: np.ndarray, max_tokens: int = 6, **fields: Any) -> Completion:
        """A whole reply."""
        handle = self.submit(prompt, max_tokens=max_tokens, **fields)
        self.run()
        return handle.result()

    @property
    def pages(self) -> int:
        return sum(pool.used for pool in self.core.keeper.pools)

    @property
    def states(self) -> int:
        pool = self.core.keeper.state_pool
        return 0 if pool is None else pool.used

    @property
    def ram(self) -> Any:
        return self.core.keeper.ladder.levels[0]

    def close(self) -> None:
        self.core.close()
        used = self.pages, self.states
        self.parts.close()
        assert used == (0, 0), f"{used} pages and states were never given back"


def ended(handle: RequestHandle) -> Finished | Failed | None:
    """The last event of a request that has ended; takes all its events."""
    last = None
    while (event := handle.next_event(timeout=0)) is not None:
        last = event
    return last if isinstance(last, Finished | Failed) else None
