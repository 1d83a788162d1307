"""Reuse equals no reuse for models with windows, with latent rows, with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, ids, join

from strata_core.testing.tiny_families import WINDOW, tiny_family

Make = Callable[..., Driver]


@pytest.fixture(params=["gemma3", "gpt-oss", "deepseek2", "qwen3moe"])
def make(request: pytest.FixtureRequest, driver: Make, tmp_path: Path) -> Iterator[Make]:
    path = tiny_family(tmp_path / "tiny.gguf", architecture=request.param, seed=7)
    yield lambda **fields: driver(model=str(path), **fields)


def test_conversations_that_take_turns_in_one_slot_resume_where_they_were(make: Make) -> None:
    """Each is parked for the other and comes back; prompts are longer than windows, and cut within one."""
    engine, fresh = make(parallel=1), make(conversation_cache=False)
    prompts = {n: ids(n, count=50 + 10 * n) for n in (1, 2)}
    for _ in range(2):
        for n, prompt in prompts.items():
            reply = engine.ask(prompt)
            assert reply.tokens == fresh.ask(prompt).tokens
            prompts[n] = join(prompt, reply.tokens, ids(9, n, count=7))
    assert [record.cached_tokens for record in engine.records[2:]] == [65, 75]
    for n, prompt in prompts.items():
        shared = len(prompt) - 13 - WINDOW // 2  # within the last prompt, which ends 13 tokens before this one
        cut = join(prompt[:shared], ids(5, n, count=9))
        reply = engine.ask(cut)
        assert reply.started.cached_tokens == shared
        assert reply.tokens == fresh.ask(cut).tokens


def test_requests_side_by_side_say_what_they_say_alone(make: Make) -> None:
    engine, fresh = make(parallel=2), make(conversation_cache=False)
    prompts = [ids(1, count=70), join(ids(1, count=40), ids(2, count=25))]
    handles = [engine.submit(prompt, max_tokens=8) for prompt in prompts]
    engine.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        reply: Any = handle.result()
        assert reply.tokens == fresh.ask(prompt, max_tokens=8).tokens
