"""The model's own layer guesses ahead: tokens come sooner, and neither replies nor what is kept change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, Driver, ended, ids, join
from foreseeing import MODELS, foreseeing

from strata_core.compute.base import Batch, Span
from strata_core.compute.reference import NumpyBackend
from strata_core.engine.drafts import Drafter
from strata_core.engine.engine import Engine
from strata_core.engine.requests import Request, Sampling
from strata_core.engine.step import Rows
from strata_core.errors import BackendError, OutOfMemory
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.pool.table import PageTable
from strata_core.settings import resolve
from strata_core.testing.runner import ModelRunner
from strata_core.testing.runner import Rows as Part
from strata_core.weights import open_model

Make = Callable[..., Driver]
PAGE = 8


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreseeing")
    return {kind: foreseeing(kind, folder) for kind in MODELS}


@pytest.fixture
def backend() -> str:
    return "numpy"


@pytest.fixture(params=[("latent", "numpy"), ("hybrid", "shadow"), ("sparse", "numpy")], ids="-".join)
def engines(request: pytest.FixtureRequest, models: dict[str, Path], driver: Make) -> Make:
    kind, backend = request.param
    return lambda **fields: driver(**(dict(model=str(models[kind]), backend=backend) | fields))


@pytest.fixture
def one(models: dict[str, Path], driver: Make) -> Make:
    """Engines of one model on one backend: what is tested is the same with all."""
    return lambda **fields: driver(**(dict(model=str(models["hybrid"])) | fields))


def run(engine: Driver, seeds: range, max_tokens: int, **fields: Any) -> list[tuple[int, ...]]:
    """Replies to prompts that are all there at once."""
    handles = [engine.submit(ids(seed, count=37 + seed), max_tokens=max_tokens, **fields) for seed in seeds]
    engine.run()
    return [handle.result().tokens for handle in handles]


def test_replies_are_the_same_and_take_fewer_steps(engines: Make) -> None:
    plain, guessing = engines(), engines(mtp=3)
    assert run(guessing, range(2), 24) == run(plain, range(2), 24)
    counters = guessing.core.counters
    assert counters.steps < plain.core.counters.steps * 0.9
    assert 0 < counters.accepted_tokens["mtp"] < counters.drafted_tokens["mtp"]
    drafted = [record.drafts["mtp"] for record in guessing.records]
    assert sum(one for one, _ in drafted) == counters.drafted_tokens["mtp"]
    assert [(record.drafted_tokens, record.accepted_tokens) for record in guessing.records] == drafted
    assert all(f"{right} of {one} guessed right (mtp)" in record.line()
               for record, (one, right) in zip(guessing.records, drafted, strict=True))  # fmt: skip


class Alone:
    """The model read anew for every question, all at once, in pages that nothing else was in."""

    def __init__(self, path: Path):
        backend = NumpyBackend()
        families = Plugins.load(environ={}, entry_points=[]).families().values()
        with open_model(path) as source:
            self.model = load_model(source, backend, families, ModelOptions(further=True))
        self._backend = backend

    def guesses(self, text: np.ndarray, count: int) -> list[int]:
        """What the layer says comes behind ``text``."""
        assert self.model.further is not None
        runner = ModelRunner(self.model, self._backend, length=128, kv_type="f32", page_tokens=PAGE)
        [stores, table] = runner.stores[:1], np.arange(128 // PAGE, dtype=np.int32)
        seen: list[np.ndarray] = []
        forward = self.model.further.forward

        def watched(*arguments: Any) -> Any:
            logits, hidden = forward(*arguments)
            seen.append(hidden)
            return logits, hidden

        self.model.further.forward = watched  # type: ignore[method-assign]
        runner.step([Part(0, 0, text[:-1])], [])
        self.model.further.forward = forward  # type: ignore[method-assign]
        hidden, found = seen[0][-1:], [int(text[-1])]
        for position in range(len(text) - 1, len(text) - 1 + count):
            batch = Batch(np.array(found[-1:], np.int32), (Span(position, 1, (table,)),), np.array([0], np.int32))
            tokens, hidden = self.model.further.guess(batch, stores, hidden)
            found.append(int(tokens[0]))
        runner.close()
        return found[1:]


@pytest.mark.parametrize("kind", MODELS)
def test_drafts_are_what_the_layer_says_of_the_text_read_at_once(
    driver: Make, models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models[kind].with_name(f"random-{kind}.gguf")  # where everything matters for a guess
    drafts: list[tuple[np.ndarray, np.ndarray]] = []
    draft = Rows.draft

    def noted(self: Rows, kind: str, tokens: np.ndarray) -> None:
        assert self.slot.live is not None
        if len(tokens):
            drafts.append((join(self.slot.live.tokens.view(), self.tokens), tokens))
        draft(self, kind, tokens)

    monkeypatch.setattr(Rows, "draft", noted)
    monkeypatch.setattr(Drafter, "due", lambda self: True)
    driver(model=str(path), mtp=3).ask(ids(3, count=37), max_tokens=16)
    alone = Alone(path)
    assert len(drafts) > 5
    for text, tokens in drafts:
        assert alone.guesses(text, len(tokens)) == tokens.tolist()


def kept(engine: Driver) -> tuple[np.ndarray, list[np.ndarray]]:
    """Ids of the one slot's conversation, and all it keeps of them: every part of K/V of every layer, and its state."""
    [slot] = engine.core.slots
    live, keeper = slot.live, engine.core.keeper
    assert live is not None
    count, out = len(live.tokens), []
    [layout], [table] = [pool.layout for pool in keeper.pools], live.table.arrays(count)
    for number, part in ((n, p) for n, layer in enumerate(layout.layers) for p in range(len(layer))):
        rows = layout.view(download(keeper.pools[0].store, table), number, part)
        out.append(rows.swapaxes(1, 2).reshape(len(table) * PAGE, -1)[:count])
    if live.states is not None and keeper.state_pool is not None:
        out.append(download(keeper.state_pool.store, [live.states.begin()[0]]).view(np.float32))
    return live.tokens.view().copy(), out


def download(store: Any, pages: Any) -> np.ndarray:
    block = np.empty((len(pages), store.layout.nbytes), np.uint8)
    store.download([int(page) for page in pages], block).wait()
    return block


def test_pages_and_states_are_those_of_a_run_without_guesses(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    guessing = engines(mtp=3, parallel=1)
    reply = guessing.ask(ids(5, count=41), max_tokens=30)
    assert 0 < guessing.core.counters.accepted_tokens["mtp"] < guessing.core.counters.drafted_tokens["mtp"]
    monkeypatch.setattr(Drafter, "due", lambda self: False)
    silent = engines(mtp=3, parallel=1)
    assert silent.ask(ids(5, count=41), max_tokens=30).tokens == reply.tokens
    assert not silent.core.counters.drafted_tokens
    (ours, found), (theirs, expected) = kept(guessing), kept(silent)
    # The two may end some right tokens apart, as the last draft may have gone beyond the reply's end.
    count = min(len(ours), len(theirs))
    assert count >= 41 + 30 - 4
    for ours_part, part in zip(found, expected, strict=True):
        if len(part) > 1 or len(ours) == len(theirs):  # a state is that of the end
            assert np.abs(ours_part[:count] - part[:count]).max() <= 1e-4


def test_wrong_guesses_hold_no_pages(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(mtp=8, parallel=1)
    monkeypatch.setattr(Drafter, "learn", lambda self, drafted, accepted: None)  # never a pause
    handle = engine.submit(ids(1, count=30), max_tokens=20)
    while engine.step():
        [slot] = engine.core.slots
        if slot.live is not None:
            assert engine.pages == -(-len(slot.live.tokens) // PAGE)
    assert handle.result().tokens == engines().ask(ids(1, count=30), max_tokens=20).tokens


def test_the_next_turns_resume_in_the_slot_and_from_where_they_were_parked(engines: Make) -> None:
    plain, guessing = engines(conversation_cache=False), engines(mtp=2, parallel=1)
    prompt = ids(2, count=45)
    for turn in range(4):
        reply = guessing.ask(prompt, max_tokens=12)
        assert reply.tokens == plain.ask(prompt, max_tokens=12).tokens
        # A draft and the token before it may have to be computed once more when the last reply ended.
        assert not turn or reply.record.read_tokens <= 10 + 1 + 3
        assert reply.record.accepted_tokens > 0
        prompt = join(prompt, reply.tokens, ids(7, turn, count=10))
        if turn % 2:
            guessing.ask(ids(9, turn, count=20), max_tokens=2)  # takes the slot
    assert guessing.core.counters.reused["ram"] > 60
    assert guessing.core.counters.reused["live"] > 60


def test_a_branch_shares_pages_and_is_guessed_as_well(one: Make) -> None:
    plain, guessing = one(conversation_cache=False), one(mtp=2)
    stem = ids(4, count=64)
    for seed in range(3):
        prompt = join(stem, ids(4, seed, count=5))
        assert guessing.ask(prompt, max_tokens=16).tokens == plain.ask(prompt, max_tokens=16).tokens
    assert guessing.core.counters.accepted_tokens["mtp"] > 0


def test_several_replies_at_once_with_both_kinds_of_guesses(engines: Make) -> None:
    plain, guessing = engines(parallel=1), engines(parallel=4, mtp=2, lookup=3)
    prompts = [np.tile(ids(seed, count=13), 4) if seed % 2 else ids(seed, count=40) for seed in range(5)]
    handles = [guessing.submit(prompt, max_tokens=9 + seed) for seed, prompt in enumerate(prompts)]
    guessing.run()
    for seed, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert handle.result().tokens == plain.ask(prompt, max_tokens=9 + seed).tokens
    assert guessing.core.counters.accepted_tokens["mtp"] > 0


def test_what_the_text_repeats_is_looked_up_and_the_layer_not_asked(one: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one(mtp=2, lookup=3)
    monkeypatch.setattr(Drafter, "propose", lambda self, text, room: text[:2] if len(text) % 2 else text[:0])
    run(engine, range(2), 20)
    assert all(engine.core.counters.drafted_tokens[kind] > 0 for kind in ("lookup", "mtp"))


def test_sampling_draws_the_same_numbers(one: Make) -> None:
    sampling = Sampling(temperature=0.05, seed=5, top_k=3, frequency_penalty=0.02)
    assert run(one(mtp=3), range(2), 20, sampling=sampling) == run(one(), range(2), 20, sampling=sampling)


def test_a_reply_ends_with_the_context(one: Make) -> None:
    replies = [one(max_context=64, mtp=mtp).ask(ids(6, count=45), max_tokens=None) for mtp in (0, 1, 8)]
    assert [reply.reason for reply in replies] == ["length"] * 3
    assert len(replies[0].tokens) == 64 - 45
    assert replies[1].tokens == replies[2].tokens == replies[0].tokens


@pytest.mark.parametrize("fields", [dict(mtp=3), dict(lookup=3)])
def test_without_pages_for_guesses_there_are_none(one: Make, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.tile(ids(1, count=13), 4)
    expected, engine = one().ask(prompt, max_tokens=20).tokens, one(**fields)
    prepare = PageTable.prepare

    def full(self: PageTable, start: int, rows: int) -> None:
        if start >= len(prompt) and rows > 1:
            prepare(self, start, rows - 1)
            raise OutOfMemory("told to be full")
        prepare(self, start, rows)

    monkeypatch.setattr(PageTable, "prepare", full)
    monkeypatch.setattr(Drafter, "propose", lambda self, text, room: text[:2] if self.most and room > 2 else text[:0])
    assert engine.ask(prompt, max_tokens=20).tokens == expected
    assert not engine.core.counters.drafted_tokens
    assert engine.core.counters.steps == 20


@pytest.mark.parametrize("fields", [dict(mtp=8), dict(lookup=8)])
def test_guesses_give_their_pages_to_who_needs_them(one: Make, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one(**fields)
    monkeypatch.setattr(Drafter, "propose", lambda self, text, room: text[: self.most])
    engine.ask(ids(9, count=20))
    engine.core.park_all("switch")
    first = engine.submit(ids(1, count=30), max_tokens=40)
    second = engine.submit(ids(2, count=4 * PAGE), max_tokens=2)
    engine.step()
    [pool] = engine.core.keeper.pools
    pool.max_pages = engine.pages + 1  # which the second needs, and guesses of the first would take
    while not ended(second):
        engine.step()
    first.cancel()
    engine.run()
    assert engine.records[1].status == "length"
    assert engine.ram.usage().entries == 1, "what is parked does not make room for guesses"


@pytest.mark.parametrize("fields", [dict(mtp=2), dict(lookup=2)])
def test_a_step_that_fails_with_guesses_is_repeated_without(
    one: Make, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = one(**fields), one()
    monkeypatch.setattr(Drafter, "propose", lambda self, text, room: text[: 2 if room > 1 and self.due() else 0])
    compute = engine.core._stepper._compute

    def failing(batch: Batch, parts: Any) -> Any:
        if any(part.drafts for part in parts):
            raise BackendError("told to fail")
        return compute(batch, parts)

    monkeypatch.setattr(engine.core._stepper, "_compute", failing)
    assert run(engine, range(2), 24) == run(plain, range(2), 24)
    assert 2 <= engine.core.counters.step_failures <= 40
    assert not engine.core.counters.drafted_tokens
    assert {record.status for record in engine.records} == {"length"}


def test_a_cancelled_reply_leaves_a_slot_that_works(one: Make) -> None:
    engine = one(mtp=3, parallel=1)
    handle = engine.submit(ids(1, count=40), max_tokens=50)
    while engine.core.counters.generated_tokens < 12:
        engine.step()
    handle.cancel()
    engine.run()
    assert ended(handle) is not None
    prompt = ids(2, count=33)
    assert engine.ask(prompt, max_tokens=20).tokens == one().ask(prompt, max_tokens=20).tokens


def test_a_layer_that_fails_costs_guesses_and_is_asked_ever_more_rarely(
    one: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, asked = one(mtp=2), []

    def fail(*arguments: Any) -> Any:
        asked.append(arguments)
        raise BackendError("told to fail")

    monkeypatch.setattr(engine.core.model.further, "guess", fail)
    prompt = ids(1, count=40)
    assert engine.ask(prompt, max_tokens=40).tokens == one().ask(prompt, max_tokens=40).tokens
    assert 2 <= len(asked) <= 6
    assert "guessing ahead for 1 replies failed" in caplog.text


def test_a_step_that_failed_is_repeated_with_the_same_hidden_rows(one: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one(mtp=2)
    layer, calls = engine.core.model.further, []
    assert layer is not None
    forward = layer.forward

    def sometimes(batch: Any, stores: Any, before: Any) -> Any:
        calls.append(len(batch.spans))
        found = forward(batch, stores, before)
        if len(batch.spans) == 2 and len(calls) % 3 == 0:
            raise BackendError("told to fail after everything was written")
        return found

    monkeypatch.setattr(layer, "forward", sometimes)
    assert run(engine, range(2), 12) == run(one(), range(2), 12)
    assert engine.core.counters.step_failures > 0
    assert engine.core.counters.accepted_tokens["mtp"] > 0


def test_a_model_without_the_layer_goes_on_without(driver: Make, caplog: pytest.LogCaptureFixture) -> None:
    plain, asked = driver(), driver(mtp=2)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("mtp: tiny.gguf has no layer that predicts further tokens")
    assert asked.ask(ids(1, count=30)).tokens == plain.ask(ids(1, count=30)).tokens
    assert asked.parts.facts["identity"] == plain.parts.facts["identity"]


def test_the_layer_is_loaded_only_when_it_is_asked_for_and_then_part_of_the_identity(engines: Make) -> None:
    plain, guessing = engines(), engines(mtp=1)
    assert plain.core.model.further is None
    assert plain.parts.weights_bytes < guessing.parts.weights_bytes
    assert plain.parts.facts["page_bytes"] < guessing.parts.facts["page_bytes"]
    assert plain.parts.facts["identity"] != guessing.parts.facts["identity"]


def test_a_conversation_goes_on_after_a_restart(models: dict[str, Path], driver: Make, tmp_path: Path) -> None:
    plugins = Plugins.load(environ={}, requested=["strata_tiers"])
    values = dict(
        model=str(models["hybrid"]), backend="numpy", kv="f32", page_tokens=PAGE, parallel=1, large_pages="off",
        conversation_cache_mib=16, conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0,
        conversation_cache_cold_dir=str(tmp_path / "cold"), conversation_cache_cold_mib=64, restore_when="always",
    )  # fmt: skip
    prompt, plain = ids(3, count=50), driver(model=str(models["hybrid"]), conversation_cache=False)
    reused = []
    for mtp in (2, 2, 0):
        settings = resolve(plugins.settings(), command_line=values | dict(mtp=mtp), environ={}, config=None)
        with Engine.open(settings, plugins) as engine:
            request = Request(prompt=prompt, sampling=GREEDY, max_tokens=20, ignore_eos=True)
            reply = engine.submit(request).result()
            engine.drain(timeout=60)
        assert reply.tokens == plain.ask(prompt, max_tokens=20).tokens
        assert reply.record.accepted_tokens > 0 or not mtp
        reused.append(reply.record.reused.get("cold", 0))
        prompt = join(prompt, reply.tokens, ids(5, len(prompt), count=9))
    # The engine without the layer has pages of another kind, and reads the conversation anew.
    assert reused[1] >= 50 and (reused[0], reused[2]) == (0, 0)
