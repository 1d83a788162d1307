"""The default model on the reference backend against golden vectors that ``transformers`` computed.

``tests/oracle/make_golden.py`` writes them; the oracle suite checks that they are still what it writes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata_core.compute.base import BackendOptions
from strata_core.compute.reference.factory import FACTORY
from strata_core.models.base import ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.weights.gguf import GGUFFile

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2.npz"
#: The ten short prompts, and those of 64, 127 and 600 tokens; the oracle suite reads all twenty.
PROMPTS = (*range(10), 12, 14, 19)
#: Largest difference to ``transformers`` in float32, and between ways of reading one prompt.
TO_GOLDEN, TO_ITSELF = 2e-4, 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def runner(default_model_path: Path) -> ModelRunner:
    # One thread: on a machine that does other things too, BLAS threads wait for each other most of the time.
    backend = FACTORY.create(BackendOptions(threads=1))
    model = load_model(GGUFFile.open(default_model_path), backend, [FAMILY], ModelOptions())
    return ModelRunner(model, backend, sequences=4, length=704)


@pytest.mark.parametrize("number", PROMPTS)
def test_logits_equal_those_of_transformers(
    runner: ModelRunner, golden: dict[str, np.ndarray], number: int
) -> None:
    logits = runner.last_logits(golden[f"prompt_{number}"], 512)
    expected, columns = golden[f"logits_{number}"], golden[f"columns_{number}"]
    assert np.abs(logits[columns] - expected).max() <= TO_GOLDEN
    assert logits.max() <= expected.max() + TO_GOLDEN  # the likeliest tokens are all among the columns


@pytest.mark.parametrize("number", [0, 7, 8, 12])
def test_greedy_tokens_equal_those_of_transformers(
    runner: ModelRunner, golden: dict[str, np.ndarray], number: int
) -> None:
    expected, gaps = golden[f"greedy_{number}"][:16], golden[f"gaps_{number}"][:16]
    assert gaps.min() > TO_GOLDEN  # no tie that rounding may decide
    assert runner.greedy(golden[f"prompt_{number}"], 16).tolist() == expected.tolist()


@pytest.fixture(scope="module")
def read_at_once(runner: ModelRunner, golden: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the last rows of the 64, 127 and 600 token prompts."""
    return np.stack([runner.last_logits(golden[f"prompt_{number}"], 1024) for number in (12, 14, 19)])


@pytest.mark.parametrize("chunk, column", [(1, 0), (7, 1), (64, 1), (512, 2)])
def test_reading_in_chunks_gives_the_same_logits(
    runner: ModelRunner, golden: dict[str, np.ndarray], read_at_once: np.ndarray, chunk: int, column: int
) -> None:
    prompt = golden[f"prompt_{(12, 14, 19)[column]}"]
    assert np.abs(runner.last_logits(prompt, chunk) - read_at_once[column]).max() <= TO_ITSELF


def test_reading_beside_three_other_sequences_gives_the_same_logits(
    runner: ModelRunner, golden: dict[str, np.ndarray], read_at_once: np.ndarray
) -> None:
    """Two of the others decode, one reads; the prompt comes in unequal chunks."""
    prompt, others = golden["prompt_14"], [golden[f"prompt_{number}"] for number in (15, 16, 17)]
    runner.step([Rows(1, 0, others[0][:100]), Rows(2, 0, others[1][:31])], [])
    read = [0, 100, 31, 0]
    for rows in (50, 1, 33, 43):
        counts = (rows, 1, 1, 64)
        texts = (prompt, *others)
        parts = [Rows(i, read[i], texts[i][read[i] : read[i] + counts[i]]) for i in (1, 0, 2, 3)]
        logits = runner.step(parts, [0, rows, rows + 1])
        read = [at + count for at, count in zip(read, counts, strict=True)]
    assert read[0] == len(prompt)
    assert np.abs(logits[1] - read_at_once[1]).max() <= TO_ITSELF
