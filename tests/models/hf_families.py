"""The tiny folders in ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(path: Path) -> Any:
    """The folder's model in float32, with plain attention; every tensor of the file is used."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    left = {name: names for name, names in info.items() if names}
    if left:
        raise ValueError(f"transformers reads {path} as another model: {left}")
    return model.eval()
