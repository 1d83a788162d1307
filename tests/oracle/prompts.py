"""Twenty prompts of 5 to 600 tokens for the default model, the same wherever they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strata_core.tokens import Tokenizer

_SHORT = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Water boils at 100 degrees Celsius, which is",
    "SELECT name, COUNT(*) FROM orders WHERE price > 9.99 GROUP BY",
    "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Das Wetter ist heute schön, und 你好 means hello; naïve café 😊",
)

#: A text of its own, written for this.
_LONG = (Path(__file__).parent / "lighthouse.txt").read_text(encoding="utf-8").strip()

#: Lengths in tokens of the prompts cut from the long text, and where each begins.
_CUTS = ((5, 0), (33, 400), (64, 10), (65, 100), (127, 50), (200, 300), (256, 120), (384, 60), (513, 20), (600, 0))


def prompts(tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of all prompts."""
    found = [tokenizer.encode(text, parse_special=True) for text in _SHORT]
    ids = tokenizer.encode(_LONG)
    for length, start in _CUTS:
        piece = ids[start : start + length]
        if len(piece) < length:
            raise ValueError(f"the long text has only {len(ids)} tokens, {start + length} are needed")
        found.append(piece)
    return [np.asarray(one, np.int32) for one in found]
