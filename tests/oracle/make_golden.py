"""Writes ``tests/golden/smollm2.npz``: what ``transformers`` says about the default model, for tests without torch.

    python tests/oracle/make_golden.py [MODEL.gguf]

Per prompt ``i``: ``prompt_i`` int32 ids; ``columns_i`` int32, the 48 likeliest next tokens and 48 spread over the
vocabulary; ``logits_i`` float32, their logits in the last row; ``greedy_i`` int32 and ``gaps_i`` float32, the
likeliest 64 tokens that follow and how far each was ahead of the second.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hf_llama
import numpy as np
from prompts import prompts

from strata_core.tokens import Tokenizer
from strata_core.weights.catalogue import DEFAULT, resolve
from strata_core.weights.gguf import GGUFFile

PATH = Path(__file__).parent.parent / "golden" / "smollm2.npz"
LIKELIEST, SPREAD, GREEDY = 48, 48, 64


def make(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file."""
    source = GGUFFile.open(path)
    model = hf_llama.load(source)
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(prompts(Tokenizer.from_metadata(source.metadata))):
        last = hf_llama.logits(model, prompt)[-1]
        spread = np.linspace(0, len(last) - 1, SPREAD).astype(np.int64)
        columns = np.concatenate([np.argsort(-last, kind="stable")[:LIKELIEST], spread]).astype(np.int32)
        greedy, gaps = hf_llama.greedy(model, prompt, GREEDY)
        found = {"prompt": prompt, "columns": columns, "logits": last[columns], "greedy": greedy, "gaps": gaps}
        arrays |= {f"{name}_{i}": array for name, array in found.items()}
    return arrays


def main() -> None:
    arrays = make(Path(sys.argv[1]) if len(sys.argv) > 1 else resolve(DEFAULT))
    PATH.parent.mkdir(exist_ok=True)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {len(arrays)} arrays, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
