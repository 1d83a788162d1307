"""Writes ``tests/golden/families.npz``: the last row of logits of every tiny folder, as transformers computes it.

Run it where torch is, from the repository's root: ``python tests/models/make_family_golden.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import hf_families
import numpy as np
from family_kit import TOKENS
from hf_logits import logits
from tiny_folders import TINIES, write

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        models = {tiny.name: hf_families.load(write(tiny, Path(folder) / tiny.name)) for tiny in TINIES}
        rows = {name: logits(model, TOKENS)[-1] for name, model in models.items()}
    np.savez_compressed(Path(__file__).parents[1] / "golden" / "families.npz", **rows)
