"""The ``llama`` family: pre-norm decoder, rotary grouped-query attention, gated SiLU (Touvron et al. 2023).

Covers what GGUF calls architecture ``llama``: Llama 1 to 3, SmolLM and others. The rows of ``attn_q`` and ``attn_k`` of
such files are in the order in which a rotated pair is two neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from strata_core.compute.base import Backend
from strata_core.errors import UnsupportedModel
from strata_core.models.base import Family, ModelOptions
from strata_core.models.config import DecoderConfig
from strata_core.models.dense import DenseModel
from strata_core.models.keys import Keys

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "llama"

#: Keys below ``llama.attention.`` that are applied, or (``layer_norm_epsilon``, a causal mask) change nothing here.
_ATTENTION_KEYS = {
    "head_count",
    "head_count_kv",
    "key_length",
    "value_length",
    "layer_norm_rms_epsilon",
    "layer_norm_epsilon",
    "scale",
}
#: Keys that change the arithmetic in ways this family does not do, with the value that asks for nothing.
_REFUSED: Mapping[str, float | bool] = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "swin_norm": False,
    "embedding_length_per_layer_input": 0,
    "attention.causal": True,
}


class LlamaModel(DenseModel):
    """See the module's docstring."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        _refuse(source)
        keys = Keys(source, ARCHITECTURE)
        config = DecoderConfig.read(keys, options)
        keys.size("feed_forward_length")
        super().__init__(source, backend, ARCHITECTURE, config, interleaved=True)


def _refuse(source: WeightSource) -> None:
    for name, neutral in _REFUSED.items():
        key = f"{ARCHITECTURE}.{name}"
        value = source.metadata.get(key, neutral)
        if value != neutral:
            raise UnsupportedModel(f"{source.path}: {key} = {value} is not supported by the llama family", param=key)
    prefix = f"{ARCHITECTURE}.attention."
    for key, value in source.metadata.items():
        name = key[len(prefix) :]
        if not key.startswith(prefix) or name in _ATTENTION_KEYS or f"attention.{name}" in _REFUSED:
            continue
        if np.any(np.asarray(value)):  # zero and empty ask for nothing
            raise UnsupportedModel(f"{source.path}: {key} = {value} is not supported by the llama family", param=key)


FAMILY = Family(ARCHITECTURE, (ARCHITECTURE,), LlamaModel)
