"""A real engine on a tiny model, and what it counted, in the shape of a replay's outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Completion, Request, Sampling
from strata_core.plugins import Plugins
from strata_core.settings import resolve
from strata_core.simulate.outcome import Outcome

FIRST_ID, VOCABULARY = 3, 384
OPENER = 1  # <|im_start|> of the tiny model


def ids(*seed: int, count: int) -> np.ndarray:
    """``count`` ordinary token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(FIRST_ID, VOCABULARY, count).astype(np.int32)


def turn(*seed: int, count: int) -> np.ndarray:
    """A message: the token that opens a turn, and ``count`` more."""
    return np.concatenate([np.array([OPENER], np.int32), ids(*seed, count=count)])


class Chat:
    """A client with one conversation."""

    def __init__(self, engine: Engine, number: int, system: np.ndarray):
        self._engine = engine
        self._number = number
        self._turn = 0
        self.history = system

    def say(self, count: int, **fields: Any) -> Completion:
        self._turn += 1
        self.history = np.concatenate(
            [self.history, turn(self._number, self._turn, count=count), np.array([OPENER], np.int32)]
        )
        reply = ask(self._engine, self.history, **fields)
        self.history = np.concatenate([self.history, np.array(reply.tokens, np.int32)])
        return reply


def ask(engine: Engine, prompt: np.ndarray, max_tokens: int = 9, **fields: Any) -> Completion:
    request = Request(prompt, Sampling(temperature=0), max_tokens=max_tokens, ignore_eos=True, **fields)
    return engine.submit(request).result()


def record(
    model: Path, trace: Path, scenario: Callable[[Engine], None], plugins: Plugins | None = None, **overrides: Any
) -> dict[str, Any]:
    """Run a scenario on a real engine with a trace; what it counted, see :func:`counted`."""
    values: dict[str, Any] = dict(
        model=str(model), backend="numpy", kv="f32", page_tokens=8, parallel=2, conversation_cache_mib=1,
        conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, large_pages="off",
        restore_when="always", record_trace=trace,
    )  # fmt: skip
    plugins = plugins or Plugins.load(environ={}, entry_points=())  # not what else is installed here
    texts = {name: str(value) for name, value in (values | overrides).items()}
    settings = resolve(plugins.settings(), command_line=texts, environ={}, config=None)
    with Engine.open(settings, plugins) as engine:
        scenario(engine)
        while engine.call(lambda core: core.working_behind()):
            pass
        stats = engine.stats()
    return {
        "requests": sum(stats.requests_total.values()),
        "prompt": stats.prompt_tokens_total,
        "read": stats.read_tokens_total,
        "reused": dict(stats.reused_tokens_total),
        "reread": dict(stats.reread_tokens_total),
        "evictions": stats.evictions,
        "discards": stats.discards,
        "demotions": stats.demotions,
        "superseded": stats.superseded,
        "compacted": stats.compacted,
        "spilled": stats.spilled,
    }


def counted(outcome: Outcome) -> dict[str, Any]:
    """The same numbers of a replay."""
    names = ("evictions", "discards", "demotions", "superseded", "compacted", "spilled")
    return {
        "requests": outcome.requests,
        "prompt": outcome.prompt,
        "read": outcome.read,
        "reused": dict(outcome.reused),
        "reread": dict(outcome.reread),
        **{name: outcome.counts[name] for name in names},
    }
