#!/usr/bin/env python3
"""Compares the logits of tiny hybrid models with llama.cpp's, from the same GGUF files.

    bench/hybrids_vs_llama_cpp.py [--peer PATH] [--bar 0.02]

Shows that names, order and meaning of tensors and keys are those of llama.cpp's files: with value heads in another
order, say, nothing would be alike. The peer is a script that is run as ``PEER MODEL --logits TOKENS.npy OUT.npy``: it
writes the logits of the last token. Prints the largest difference for prompts of several lengths; exit status 1 when
one is above the bar. The peer computes with f16 K/V and activations in eight bits or more, so it never equals ours.

Sparse attention is compared within the indexer's budget. Beyond it llama.cpp always attends ``top_k + block - 1``
positions, the last of them a part of a block, where ``transformers`` (and this) attends whole blocks of ``top_k``
positions and what is in no block.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tokenizer_vs_llama_cpp import DEFAULT_PEER

from strata_core.compute.reference import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.testing.runner import ModelRunner
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights.gguf import GGUFFile

LENGTHS = (1, 2, 7, 30, 64)
TOKENS = np.random.default_rng(1).integers(3, 384, max(LENGTHS)).astype(np.int32)
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3next": tiny_hybrid,
    "qwen35": partial(tiny_hybrid, architecture="qwen35"),
    "qwen35moe": partial(tiny_hybrid, architecture="qwen35moe"),
    "qwen4exp": partial(tiny_sparse, top_k=64),
}


def ours(path: Path) -> np.ndarray:
    """Logits of every row."""
    backend, families = NumpyBackend(), Plugins.load(environ={}, entry_points=[]).families().values()
    model = load_model(GGUFFile.open(path), backend, families, ModelOptions())
    return ModelRunner(model, backend, length=max(LENGTHS), page_tokens=8, kv_type="f16").logits(TOKENS)


def theirs(peer: Path, model: Path, count: int) -> np.ndarray:
    """Logits of the last of ``count`` tokens."""
    tokens, out = model.with_suffix(".tokens.npy"), model.with_suffix(".logits.npy")
    np.save(tokens, TOKENS[:count])
    subprocess.run([sys.executable, peer, model, "--logits", tokens, out], check=True)
    found: np.ndarray = np.load(out)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, default=DEFAULT_PEER)
    parser.add_argument("--bar", type=float, default=0.02)
    options = parser.parse_args()
    worst = 0.0
    print("largest difference after", *(f"{count:>8}" for count in LENGTHS), " tokens; of logits up to")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in MODELS.items():
            path = make(Path(folder) / f"{name}.gguf")
            rows = ours(path)
            off = [float(np.abs(rows[n - 1] - theirs(options.peer, path, n)).max()) for n in LENGTHS]
            worst = max(worst, *off)
            print(f"{name:24}", *(f"{difference:8.4f}" for difference in off), f"{np.abs(rows).max():8.1f}", flush=True)
    print(f"worst {worst:.4f}, bar {options.bar}")
    return int(worst > options.bar)


if __name__ == "__main__":
    sys.exit(main())
