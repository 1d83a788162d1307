"""The ``qwen3`` family: Qwen 2 without biases, with norms of every query and key head (Yang et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.compute.base import Backend
from strata_core.models.base import Family, ModelOptions
from strata_core.models.config import DecoderConfig
from strata_core.models.dense import DenseModel
from strata_core.models.keys import Keys

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen3"


class Qwen3Model(DenseModel):
    """See the module's docstring."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        config = DecoderConfig.read(keys, options)
        keys.size("feed_forward_length")
        keys.refuse_others()
        super().__init__(source, backend, ARCHITECTURE, config, interleaved=False, head_norms=True)


FAMILY = Family(ARCHITECTURE, (ARCHITECTURE,), Qwen3Model)
