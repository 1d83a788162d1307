"""The ``qwen3_5_moe`` family: :mod:`qwen3_5 <strata_core.models.qwen3_5>` with experts, of which one is shared."""

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

ARCHITECTURE = "qwen35moe"


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
        tiled=True,
        feed_forwards=load_mixtures(source, backend, sizes.feed_forwards, sizes.width, mixture),
        facts=attrs.asdict(mixture),
    )


FAMILY = Family("qwen3_5_moe", (ARCHITECTURE,), load)
