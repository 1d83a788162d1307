"""Builds tiny Hugging Face folders without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

WIDTH, HEADS, KV, DIM, FFN, VOCAB = 8, 2, 1, 4, 12, 10

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": 2, "vocab_size": VOCAB,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_theta": 5e4, "tie_word_embeddings": False,
}  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def llama_tensors(layers: int = 2) -> dict[str, NDArray[Any]]:
    """The weights of a llama by their names in such folders."""
    tensors = {"model.embed_tokens.weight": numbers(VOCAB, WIDTH), "lm_head.weight": numbers(VOCAB, WIDTH, seed=1)}
    tensors["model.norm.weight"] = numbers(WIDTH)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (HEADS * DIM, WIDTH), "self_attn.k_proj": (KV * DIM, WIDTH),
            "self_attn.v_proj": (KV * DIM, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * DIM),
            "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH), "mlp.down_proj": (WIDTH, FFN),
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        }  # fmt: skip
        for number, (name, shape) in enumerate(shapes.items()):
            tensors[f"model.layers.{layer}.{name}.weight"] = numbers(*shape, seed=10 * layer + number)
    return tensors


def write_folder(
    path: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]], files: int = 1, **more: object
) -> Path:
    """Write a folder; ``more`` are further JSON files by their stem."""
    path.mkdir(parents=True, exist_ok=True)
    for stem, content in {"config": config, **more}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    if files == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, path / name)
        places |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path
