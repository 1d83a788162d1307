"""Tiny random models of every family give the logits of ``transformers``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_folders import TINIES, VOCAB, Tiny, write

from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.runner import ModelRunner
from strata_core.weights import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

TOKENS = np.random.default_rng(1).integers(3, VOCAB, 90).astype(np.int32)
TOLERANCE = 1e-4


def theirs(path: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].numpy()
    return found


@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: tiny.name)
def test_logits_are_those_of_transformers(tmp_path: Path, tiny: Tiny) -> None:
    path, backend = write(tiny, tmp_path / "model"), NumpyBackend()
    families = Plugins.load(environ={}, entry_points=[]).families()
    with open_model(path) as source:
        model = load_model(source, backend, families.values(), ModelOptions())
        found = ModelRunner(model, backend, length=128, page_tokens=16).logits(TOKENS)
    expected = theirs(path)
    assert np.abs(expected).max() > 1  # numbers worth comparing
    assert np.abs(found - expected).max() <= TOLERANCE
