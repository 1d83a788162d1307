"""A model with sparse attention, recurrent state and n-gram embeddings in the engine: reuse equals no reuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_driver import GREEDY, Driver, ids, join

from strata_core.engine.engine import Engine
from strata_core.engine.requests import Request
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings
from strata_core.testing.tiny_hybrid import tiny_sparse

Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sparse(tmp_path_factory.mktemp("model") / "sparse.gguf", seed=7)


@pytest.fixture
def sparse(driver: Make, sparse_model: Path) -> Make:
    return lambda **fields: driver(model=str(sparse_model), **fields)


def test_conversations_that_take_turns_in_one_slot_go_on_where_they_were(sparse: Make) -> None:
    """Each is parked for the other. A resumed row's n-grams reach back over the place where it was resumed."""
    engine, fresh = sparse(parallel=1), sparse(conversation_cache=False)
    prompts = {n: ids(n, count=50 + 10 * n) for n in (1, 2)}
    for _ in range(3):
        for n, prompt in prompts.items():
            reply = engine.ask(prompt)
            assert reply.tokens == fresh.ask(prompt).tokens
            prompts[n] = join(prompt, reply.tokens, ids(9, n, count=7))
    # The end of the turn before: all but the reply's last token, which was not computed, and the seven.
    assert [r.cached_tokens for r in engine.records[2:]] == [r.prompt_tokens - 8 for r in engine.records[2:]]


def test_branches_of_one_conversation_side_by_side(sparse: Make) -> None:
    engine, fresh = sparse(parallel=2), sparse(conversation_cache=False)
    common = ids(1, count=60)
    engine.ask(common)
    prompts = [join(common, ids(n, count=20)) for n in (2, 3)]
    handles = [engine.submit(prompt, max_tokens=8) for prompt in prompts]
    engine.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.result().tokens == fresh.ask(prompt, max_tokens=8).tokens


def test_the_way_of_reading_the_table_changes_no_reply_and_its_reads_are_counted(
    sparse_model: Path, plugins: Plugins
) -> None:
    replies, prompt = [], np.concatenate([ids(1, count=40), ids(1, count=40)])
    for way in ("mmap", "direct", "ram"):
        settings = Settings(model=str(sparse_model), backend="numpy", ple_io=way, ple_cache_mib=1, large_pages="off")
        with Engine.open(settings, plugins) as engine:
            request = Request(prompt=prompt, sampling=GREEDY, ignore_eos=True, max_tokens=6)
            replies.append(engine.submit(request).result().tokens)
            counts = engine.stats().model_counts
        assert counts["ple_rows"] == 4 * (80 + 5)
        # Of the prompt's second half all but the first two n-grams were there before.
        assert (0 < counts["ple_reads"] <= 4 * (40 + 2 + 5)) if way == "direct" else counts["ple_reads"] == 0
    assert replies[0] == replies[1] == replies[2]
