"""The default model on the reference backend against ``transformers`` in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_llama
import make_golden
from prompts import prompts

from strata_core.compute.base import BackendOptions
from strata_core.compute.reference.factory import FACTORY
from strata_core.models.base import ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.runner import ModelRunner
from strata_core.tokens import Tokenizer
from strata_core.weights.gguf import GGUFFile

pytestmark = [pytest.mark.oracle, pytest.mark.model, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def source(default_model_path: Path) -> GGUFFile:
    return GGUFFile.open(default_model_path)


@pytest.fixture(scope="module")
def runner(source: GGUFFile) -> ModelRunner:
    # One thread: on a machine that does other things too, BLAS threads wait for each other most of the time.
    backend = FACTORY.create(BackendOptions(threads=1))
    return ModelRunner(load_model(source, backend, [FAMILY], ModelOptions()), backend, length=704)


@pytest.fixture(scope="module")
def made(default_model_path: Path) -> dict[str, np.ndarray]:
    """What ``transformers`` says today."""
    return make_golden.make(default_model_path)


def test_every_logit_of_every_row_is_that_of_transformers(source: GGUFFile, runner: ModelRunner) -> None:
    oracle, worst = hf_llama.load(source), []
    for prompt in prompts(Tokenizer.from_metadata(source.metadata)):
        difference = np.abs(runner.logits(prompt) - hf_llama.logits(oracle, prompt))
        worst.append(float(difference.max()))
        print(f"{len(prompt):4} tokens: max abs logit difference {worst[-1]:.2e}, mean {difference.mean():.2e}")
    assert len(worst) == 20
    assert max(worst) <= 2e-4


def test_the_committed_golden_vectors_are_what_transformers_says(made: dict[str, np.ndarray]) -> None:
    with np.load(make_golden.PATH) as committed:
        assert set(committed) == set(made)
        for name, array in made.items():
            if array.dtype == np.float32:  # rounding differs with the number of threads
                assert np.allclose(committed[name], array, rtol=0, atol=1e-4), name
            elif not name.startswith("columns"):  # the order of near-equal logits does, too
                assert committed[name].tolist() == array.tolist(), name


def test_greedy_replies_are_those_of_transformers(made: dict[str, np.ndarray], runner: ModelRunner) -> None:
    same = 0
    for i in range(20):
        expected, gaps = made[f"greedy_{i}"], made[f"gaps_{i}"]
        found = runner.greedy(made[f"prompt_{i}"], len(expected))
        differs = np.flatnonzero(found != expected)
        same += not len(differs)
        if len(differs):
            at = differs[0]
            print(f"prompt {i}: token {at} is {found[at]}, not {expected[at]}; the best two were {gaps[at]:.1e} apart")
            assert gaps[at] < 4e-4, "the difference is not a tie"
    assert same >= 18
