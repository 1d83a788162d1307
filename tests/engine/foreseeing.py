"""Tiny models whose own layer for further tokens is often right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse
from strata_core.weights import open_model

#: What layers add to the residual.
_ADDED = ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ple_value", "ple_conv1d")
#: Factor on it. The next token then depends on the last one most of the time, and on all others sometimes.
WEAK = 0.005

MODELS = {
    "latent": lambda path: tiny_family(path, architecture="deepseek2", seed=7, layers=2, further=1),
    "hybrid": lambda path: tiny_hybrid(path, architecture="qwen35", seed=7, layers=3, further=1),
    "sparse": lambda path: tiny_sparse(path, seed=7, layers=2, further=1),
}


def foreseeing(kind: str, folder: Path) -> Path:
    """A model of one of the kinds of :data:`MODELS`, beside ``random-{kind}.gguf``, which it is made of. Its last layer
    does what the others do with the last token: it takes the embedding nearly as it is, and its output is the model's.
    """
    with open_model(MODELS[kind](folder / f"random-{kind}.gguf")) as source:
        tensors = {name: tensor.dequantise() for name, tensor in source.tensors.items()}
        keys = dict(source.metadata)
    for name in tensors:
        if name.split(".")[-2] in _ADDED:
            tensors[name] = tensors[name] * np.float32(WEAK)
    [entry] = [name for name in tensors if name.endswith("nextn.eh_proj.weight")]
    prefix = entry.removesuffix("eh_proj.weight")
    width = len(tensors[entry])
    tensors[entry] = np.concatenate([np.eye(width, dtype=np.float32), 0.03 * tensors[entry][:, width:]], axis=1)
    tensors[f"{prefix}enorm.weight"] = np.ones(width, np.float32)
    for name, of_model in [("shared_head_norm", "output_norm"), *((f"hc_head_{p}", f"output_hc_{p}") for p in _MIXER)]:
        if f"{of_model}.weight" in tensors:
            tensors[f"{prefix}{name}.weight"] = tensors[f"{of_model}.weight"]
    return write_gguf(folder / f"{kind}.gguf", keys, {name: quantise(array, "F32") for name, array in tensors.items()})


_MIXER = ("norm", "down", "up")
