"""What the engine knows of a model, and what a family registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from strata_core.compute.base import Backend, Batch, PageStore
    from strata_core.pool.layout import PageLayout
    from strata_core.weights.source import WeightSource


@attrs.frozen
class ModelOptions:
    """What a user may override in how a model is read; None keeps the file's own value.

    :ivar rope_scaling: ``none``, ``linear`` or ``yarn``.
    :ivar rope_freq_base: base of the rotary frequencies.
    :ivar rope_scale: factor by which the context is stretched (linear, yarn).
    :ivar ple_io: how rows of a per-layer embedding table are read, one of :data:`strata_core.weights.rows.WAYS`.
    :ivar ple_cache_bytes: most bytes of such rows to keep with ``direct``.
    """

    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_scale: float | None = None
    ple_io: str = "mmap"
    ple_cache_bytes: int = 256 << 20


@attrs.frozen
class Geometry:
    """Sizes that do not depend on settings."""

    architecture: str
    layers: int
    width: int
    vocab: int
    context: int


class Model(ABC):
    """A loaded model on one backend. Stateless between steps: all that a sequence accumulates is in its pages.

    :cvar lookback: how many token ids before its first row a span must bring along (:attr:`Span.before`).
    """

    geometry: Geometry
    lookback: int = 0

    @abstractmethod
    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        """The kinds of pages its layers need; the numbers of stores and page tables follow this order."""

    def state_layout(self) -> PageLayout | None:
        """What a state page holds; None (the default) for a model whose layers accumulate nothing but K/V, which can
        be resumed at any position. Its store comes behind those of the layouts."""
        return None

    @abstractmethod
    def identity(self) -> Mapping[str, str | int | float]:
        """Everything beside weights and tokenizer that changes K/V: geometry, rope with overrides, norms' epsilon."""

    def counters(self) -> Mapping[str, int]:
        """What the model counted since it was loaded, by name; nothing by default. Asked by the engine's thread."""
        return {}

    def close(self) -> None:  # noqa: B027 - most models hold nothing but what the backend holds
        """Give back files and threads. The model is not used afterwards; its backend is closed by others."""

    @abstractmethod
    def forward(self, batch: Batch, stores: Sequence[PageStore]) -> np.ndarray:
        """Run one step: writes the rows' K/V, returns float32 logits ``(len(batch.outputs), vocab)`` on the host."""


@attrs.frozen
class Family:
    """What ``strata_register_families`` registers.

    :ivar architectures: values of ``general.architecture`` it loads.
    :ivar load: builds the model; raises ModelFileError or UnsupportedModel naming key or tensor.
    """

    name: str
    architectures: tuple[str, ...]
    load: Callable[[WeightSource, Backend, ModelOptions], Model] = attrs.field(repr=False)
