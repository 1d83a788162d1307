"""The ``qwen3_next`` family: gated delta nets, every fourth layer gated attention, experts of which one is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from strata_core.models.base import Family, ModelOptions
from strata_core.models.hybrid.feed_forward import MixtureSizes, load_mixtures
from strata_core.models.hybrid.model import HybridModel
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.keys import Keys

if TYPE_CHECKING:
    from strata_core.compute.base import Backend
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen3next"


def load(source: WeightSource, backend: Backend, options: ModelOptions) -> HybridModel:
    """
    :raises ModelFileError: a key or tensor is missing or impossible.
    :raises UnsupportedModel: a key asks for what this family does not do.
    """
    keys = Keys(source, ARCHITECTURE)
    sizes, mixture = HybridSizes.read(keys, options), MixtureSizes.read(keys)
    keys.refuse_others()
    return HybridModel(
        source,
        backend,
        ARCHITECTURE,
        sizes,
        tiled=False,
        feed_forwards=load_mixtures(source, backend, sizes.feed_forwards, sizes.width, mixture),
        facts=attrs.asdict(mixture),
    )


FAMILY = Family("qwen3_next", (ARCHITECTURE,), load)
