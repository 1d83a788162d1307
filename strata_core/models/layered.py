"""Models of which the rows behind the last layer can be had, apart from the logits that are made of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata_core.compute.base import Array, Backend, Batch, PageStore
from strata_core.models.base import Model


class LayeredModel(Model):
    """A model in two parts: its layers, and the output. A subclass sets ``_backend`` while it is loaded."""

    _backend: Backend

    @abstractmethod
    def embed(self, step: Any) -> Array:
        """Embedded rows ``(rows, width)`` of the step's tokens."""

    @abstractmethod
    def hidden(self, step: Any, batch: Batch, every: bool) -> Array | None:
        """Run all layers: every row's K/V and states are written.

        :param every: whether rows without wanted logits go through to the end too.
        :returns: hidden rows, of all rows or of the wanted ones; None where there are none of these.
        """

    @abstractmethod
    def logits(self, hidden: Array) -> Array:
        """``(rows, vocab)`` of hidden rows."""

    def forward(self, batch: Batch, stores: Sequence[PageStore]) -> np.ndarray:
        if self.further is not None:
            unknown = np.zeros((len(batch.spans), self.further.width), np.float32)
            return self.further.forward(batch, stores, unknown)[0]
        hidden = self.hidden(self._backend.begin(batch, stores), batch, every=False)
        return self.no_logits() if hidden is None else self._backend.to_host(self.logits(hidden))

    def no_logits(self) -> np.ndarray:
        """What a step gives of which no logits are wanted."""
        return np.empty((0, self.geometry.vocab), np.float32)
