"""Our logits beside those of ``transformers``, however a prompt came to be in a model: the columns of a table.

Each column is a function of a :class:`Pair` that returns the largest difference of any logit of any row it computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import hf_families
import hf_hybrids
import numpy as np
import tiny_folders
from hf_logits import logits

from strata_core.compute.base import BackendOptions
from strata_core.engine.core import EngineCore
from strata_core.engine.engine import Engine
from strata_core.engine.requests import Completion, Request, Sampling
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.settings import resolve
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.weights import open_model

TOLERANCE = 1e-4
VOCAB = tiny_folders.VOCAB
assert hf_hybrids.VOCAB == VOCAB

#: With the token that cuts n-grams (5) among them, also twice in a row. Longer than every window.
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 83).astype(np.int32)
TOKENS[[20, 21, 44, 61]] = 5
PAGE_TOKENS = 8

#: Writes a model to a folder and returns it as ``transformers`` has it.
Save = Callable[[Path], Any]


@attrs.frozen
class Case:
    """A tiny model.

    :ivar plain: it stands for its family, whose name it has; others are variants.
    """

    name: str
    plain: bool
    save: Save = attrs.field(repr=False)


def _folder(tiny: tiny_folders.Tiny) -> Case:
    return Case(tiny.name, tiny.name == tiny.family, lambda path: hf_families.load(tiny_folders.write(tiny, path)))


def _hybrid(hybrid: hf_hybrids.Hybrid) -> Case:
    return Case(hybrid.name, "-" not in hybrid.name, lambda path: hf_hybrids.saved(hybrid, path))


CASES = (*map(_folder, tiny_folders.TINIES), *map(_hybrid, hf_hybrids.HYBRIDS))


@attrs.define(eq=False)
class Pair:
    """A model of theirs, and ours from the same folder.

    :ivar expected: their logits ``(len(TOKENS), VOCAB)``; :ivar scratch: a folder for what is written to disk.
    :ivar backend: name of ours.
    """

    path: Path
    theirs: Any
    scratch: Path
    backend: str
    plugins: Plugins
    expected: np.ndarray

    @classmethod
    def make(cls, case: Case, folder: Path, plugins: Plugins, backend: str = "numpy") -> Pair:
        """:param plugins: with that of the disk levels and that of the backend."""
        path = folder / "model"
        theirs = case.save(path)
        _write_tokenizer(path)
        return cls(path, theirs, folder, backend, plugins, logits(theirs, TOKENS))

    @contextmanager
    def runner(self) -> Iterator[ModelRunner]:
        backend = self.plugins.choose_backend(self.backend).create(BackendOptions(1))
        with open_model(self.path) as source:
            model = load_model(source, backend, self.plugins.families().values(), ModelOptions())
            runner = ModelRunner(model, backend, sequences=3, length=96, kv_type="f32", page_tokens=PAGE_TOKENS)
            try:
                yield runner
            finally:
                runner.close()
                model.close()
                backend.close()

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine whose conversations go to a cold level, and are there once it is closed."""
        values = dict(
            model=str(self.path), backend=self.backend, threads=1, kv="f32", page_tokens=PAGE_TOKENS, parallel=1,
            conversation_cache_mib=16, conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0,
            conversation_cache_cold_dir=str(self.scratch / "cold"), conversation_cache_cold_mib=64,
            restore_when="always", large_pages="off",
        )  # fmt: skip
        settings = resolve(self.plugins.settings(), command_line=values, environ={}, config=None)
        engine = Engine.open(settings, self.plugins)
        try:
            yield engine
            engine.drain(timeout=60)
        finally:
            engine.close()

    def off(self, found: np.ndarray, start: int = 0) -> float:
        """The largest difference of rows from position ``start`` on."""
        return float(np.abs(found - self.expected[start : start + len(found)]).max())


def _write_tokenizer(path: Path) -> None:
    """One letter per id: a model is served only with a tokenizer."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    rules = {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {letter: number for number, letter in enumerate(letters)}, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(rules))


# -- the columns ------------------------------------------------------------------------------------------------


def full(pair: Pair) -> float:
    """The prompt read at once."""
    with pair.runner() as runner:
        return pair.off(runner.logits(TOKENS))


def chunked(pair: Pair) -> float:
    """In chunks that are less than a page, cut pages, and are several."""
    return max(_in_chunks(pair, chunk) for chunk in (2, 7, 19))


def stepwise(pair: Pair) -> float:
    """Token by token."""
    return _in_chunks(pair, 1)


def _in_chunks(pair: Pair, chunk: int) -> float:
    with pair.runner() as runner:
        parts = [TOKENS[start : start + chunk] for start in range(0, len(TOKENS), chunk)]
        return max(
            pair.off(runner.step([Rows(0, number * chunk, part)], range(len(part))), number * chunk)
            for number, part in enumerate(parts)
        )


def resumed(pair: Pair) -> float:
    """From the stored bytes of pages and state, after one token, at a page's end, within a page."""
    return max(_resumed(pair, position) for position in (1, 24, 45))


def _resumed(pair: Pair, position: int) -> float:
    with pair.runner() as runner:
        runner.step([Rows(0, 0, TOKENS[:position])], [])
        image = runner.image(0, position)
        runner.step([Rows(0, position, TOKENS[::-1][:20].copy())], [])  # goes on otherwise; what is stored stays
        runner.resume(2, image)
        rest = TOKENS[position:]
        return pair.off(runner.step([Rows(2, position, rest)], range(len(rest))), position)


def batched(pair: Pair) -> float:
    """Beside others that read and decode, in every place of the batch."""
    other = TOKENS[::-1].copy()
    with pair.runner() as runner:
        runner.step([Rows(1, 0, other[:30])], [])
        first = runner.step([Rows(0, 0, TOKENS[:40]), Rows(1, 30, other[30:31])], range(40))
        parts = [Rows(1, 31, other[31:45]), Rows(0, 40, TOKENS[40:82]), Rows(2, 0, other[:3])]
        second = runner.step(parts, range(14, 14 + 42))
        last = runner.step([Rows(2, 3, other[3:4]), Rows(1, 45, other[45:46]), Rows(0, 82, TOKENS[82:])], [2])
        return max(pair.off(first), pair.off(second, 40), pair.off(last, 82))


def parked(pair: Pair) -> float:
    """Two turns of a conversation, the engine closed between them: the second goes on from the cold level's files.

    Its prompt ends, and its reply is generated, behind what was stored; their logits of the same tokens are taken anew.

    :raises AssertionError: the second engine did not resume from the files.
    """
    reply, differences = np.empty(0, np.int32), []
    for begin, stop in ((0, 50), (50, len(TOKENS))):
        with pair.engine() as engine:
            # The second prompt is the first one, the reply to it, and more.
            prompt = np.concatenate([TOKENS[:begin], reply, TOKENS[begin:stop]])
            rows, done = _ask(engine, prompt)
        # The last sampled token of the first turn was never computed.
        stored = {"cold": begin + len(reply) - 1} if begin else {}
        assert done.record.reused == stored, f"{done.record.reused} reused instead of {stored}"
        reply = np.array(done.tokens, np.int32)
        expected = logits(pair.theirs, np.concatenate([prompt, reply]))[len(prompt) - 1 : -1]
        differences.append(float(np.abs(rows - expected).max()))
    return max(differences)


def _ask(engine: Engine, prompt: np.ndarray) -> tuple[np.ndarray, Completion]:
    """A greedy reply, and the logits ``(len(reply), vocab)`` that its tokens were sampled from."""
    rows: list[np.ndarray] = []

    def watch(core: EngineCore) -> None:
        model: Any = core.model
        forward = model.forward

        def watched(*arguments: Any) -> np.ndarray:
            found: np.ndarray = forward(*arguments)
            rows.extend(found.copy())
            return found

        model.forward = watched

    engine.call(watch)
    request = Request(prompt=prompt, sampling=Sampling(temperature=0), max_tokens=6, ignore_eos=True)
    done = engine.submit(request).result()
    return np.array(rows), done


COLUMNS: dict[str, Callable[[Pair], float]] = {
    "full": full, "chunked": chunked, "stepwise": stepwise, "resumed": resumed, "batched": batched, "parked": parked,
}  # fmt: skip
