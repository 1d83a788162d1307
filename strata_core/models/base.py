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
    :ivar further: load the layer that predicts further tokens, where the file has one (:class:`DraftLayer`).
    """

    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_scale: float | None = None
    ple_io: str = "mmap"
    ple_cache_bytes: int = 256 << 20
    further: bool = False


@attrs.frozen
class Geometry:
    """Sizes that do not depend on settings."""

    architecture: str
    layers: int
    width: int
    vocab: int
    context: int


class DraftLayer(ABC):
    """A model's own layer for multi-token prediction: it guesses the token behind the next one.

    It attends like the model's other layers and has K/V in the same pages. Its row of position ``q`` is made from the
    token there and the *hidden row* of position ``q - 1``: what the model, or this layer before it, made of all up to
    there. So the row depends on no token behind its own, and pages are shared, kept and restored as ever. Where the
    hidden row is not known (before position 0, and behind a restore) it is zeros, which costs some guesses, never a
    reply: nothing but guesses depends on these K/V.

    Files number the row of position ``q`` as ``q - 1``. Here it is ``q``, as the step has it; attention is relative.

    :ivar width: elements of a hidden row.
    """

    width: int

    @abstractmethod
    def forward(
        self, batch: Batch, stores: Sequence[PageStore], before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`Model.forward` that also writes this layer's K/V of all rows.

        :param before: float32 ``(spans, width)``: hidden rows of the positions before the spans' first ones.
        :returns: the logits, and float32 ``(rows, width)``: the hidden rows of all rows, on the host.
        """

    @abstractmethod
    def guess(
        self, batch: Batch, stores: Sequence[PageStore], hidden: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Guess what follows one token of each sequence; writes this layer's K/V of these rows, and no others.

        :param batch: spans of one row each, without states; all rows are outputs.
        :param stores: those of the model's layouts, without that of states.
        :param hidden: float32 ``(rows, width)``: hidden rows of the positions before the rows'.
        :returns: int32 ``(rows,)``: the likeliest next tokens; float32 ``(rows, width)``: this layer's hidden rows, for
            the guess behind that.
        """


class Model(ABC):
    """A loaded model on one backend. Stateless between steps: all that a sequence accumulates is in its pages.

    :cvar lookback: how many token ids before its first row a span must bring along (:attr:`Span.before`).
    :cvar further: the layer that guesses further tokens; None where the file has none or it was not asked for.
    """

    geometry: Geometry
    lookback: int = 0
    further: DraftLayer | None = None

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
