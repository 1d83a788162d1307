"""The ``qwen3_5`` family: gated delta nets, every fourth layer gated attention, dense feed-forward.

Only text is read. Value heads are tiled, see :mod:`strata_core.models.hybrid.delta_net`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.models.base import Family, ModelOptions
from strata_core.models.hybrid.feed_forward import load_dense
from strata_core.models.hybrid.model import HybridModel
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.keys import Keys
from strata_core.models.loading import Block

if TYPE_CHECKING:
    from strata_core.compute.base import Backend
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen35"


def load(source: WeightSource, backend: Backend, options: ModelOptions) -> HybridModel:
    """
    :raises ModelFileError: a key or tensor is missing or impossible.
    :raises UnsupportedModel: a key asks for what this family does not do.
    """
    keys = Keys(source, ARCHITECTURE)
    sizes, ffn = HybridSizes.read(keys, options), keys.size("feed_forward_length")
    keys.refuse_others()
    return HybridModel(
        source,
        backend,
        ARCHITECTURE,
        sizes,
        tiled=True,
        feed_forwards=[load_dense(Block(source, backend, n), sizes.width, ffn) for n in sizes.feed_forwards],
        facts={},
    )


FAMILY = Family("qwen3_5", (ARCHITECTURE,), load)
