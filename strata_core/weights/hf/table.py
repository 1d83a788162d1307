"""The mappings by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from strata_core.weights.hf import deepseek, gemma, gpt_oss, hybrid, llama, qwen, qwen4
from strata_core.weights.hf.mapping import ModelMapping

_ALL = (
    llama.MAPPING, *qwen.MAPPINGS, gemma.MAPPING, gpt_oss.MAPPING, deepseek.MAPPING, *hybrid.MAPPINGS, qwen4.MAPPING
)  # fmt: skip

#: Mappings by the values of ``model_type`` that they read.
MAPPINGS: Mapping[str, ModelMapping] = MappingProxyType({name: entry for entry in _ALL for name in entry.model_types})
