"""The tiny folders in ``transformers``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from family_kit import TOKENS
from transformers import AutoModelForCausalLM


def logits(path: Path) -> np.ndarray:
    """Logits ``(len(TOKENS), vocab)`` in float32, with plain attention; every tensor of the file is used."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    left = {name: names for name, names in info.items() if names}
    if left:
        raise ValueError(f"transformers reads {path} as another model: {left}")
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].numpy()
    return found
