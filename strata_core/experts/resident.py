"""All experts in the backend's memory, from loading to the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from strata_core.experts.base import ExpertSource, ExpertTensors

if TYPE_CHECKING:
    from strata_core.compute.base import Array, Backend


class ResidentExperts(ExpertSource):
    """Takes in every expert while the model is loaded, so that fetching has nothing to do.

    :param layers: by number of the layer; those without experts are absent.
    :raises OutOfMemory: they do not fit.
    """

    def __init__(self, backend: Backend, layers: Mapping[int, ExpertTensors]):
        self._layers = {
            number: backend.experts(t.gate, t.up, t.down, t.gate_up_bias, t.down_bias) for number, t in layers.items()
        }

    def fetch(self, layer: int, ids: np.ndarray) -> Array:
        return self._layers[layer]
