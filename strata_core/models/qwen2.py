"""The ``qwen2`` family: a llama with biases of queries, keys and values, rotated in halves (Yang et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.compute.base import Backend
from strata_core.models.base import Family, ModelOptions
from strata_core.models.config import DecoderConfig
from strata_core.models.dense import DenseModel
from strata_core.models.keys import Keys

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen2"


class Qwen2Model(DenseModel):
    """See the module's docstring."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        config = DecoderConfig.read(keys, options)
        keys.size("feed_forward_length")
        keys.refuse_others()
        super().__init__(source, backend, ARCHITECTURE, config, interleaved=False)


FAMILY = Family(ARCHITECTURE, (ARCHITECTURE,), Qwen2Model)
