"""The contract between model families and whatever holds the matrices of their experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from strata_core.compute.base import Array
    from strata_core.weights.tensor import StoredTensor


@attrs.frozen(eq=False)
class ExpertTensors:
    """The experts of one layer as a model file holds them; shapes as :meth:`Backend.experts` takes them.

    :ivar gate: ``(experts, ffn, width)``, or with ``up`` None both, gate first: ``(experts, 2 * ffn, width)``.
    :ivar down: ``(experts, width, ffn)``.
    :ivar gate_up_bias: ``(experts, 2 * ffn)`` or None; :ivar down_bias: ``(experts, width)`` or None.
    """

    gate: StoredTensor
    up: StoredTensor | None
    down: StoredTensor
    gate_up_bias: StoredTensor | None = None
    down_bias: StoredTensor | None = None


class ExpertSource(ABC):
    """The experts of all layers of one model.

    A family routes, says what it needs with :meth:`fetch`, and computes with what it got; which experts are in memory,
    and which are brought there, is decided here. One thread (the engine's) makes all calls.
    """

    @abstractmethod
    def fetch(self, layer: int, ids: np.ndarray) -> Array:
        """Make the experts that a step needs ready, before they are used.

        :param layer: number of the layer in the model.
        :param ids: int32 ``(rows, top)``, what :meth:`Backend.route` chose.
        :returns: what :meth:`Backend.mixture` takes with the same ids; valid until the layer is fetched again.
        """
