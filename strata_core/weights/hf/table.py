"""The mappings by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from strata_core.weights.hf import llama, qwen
from strata_core.weights.hf.mapping import ModelMapping

_ALL = (llama.MAPPING, *qwen.MAPPINGS)

#: Mappings by the values of ``model_type`` that they read.
MAPPINGS: Mapping[str, ModelMapping] = MappingProxyType({name: entry for entry in _ALL for name in entry.model_types})
