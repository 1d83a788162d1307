"""Gated hyper-connections (Qwen4-Exp): a residual of several streams, of which each layer reads a mixture.

A layer's input is the mean over streams of the normed streams, each element gated by a projection of all of them
through a narrow layer; what the layer makes is added to every stream with a weight of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import Array, Backend

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


@attrs.frozen(eq=False)
class StreamMixer:
    """One connection. Rows of streams are ``(rows, streams * width)``.

    :ivar norm: a weight for every element of every stream.
    :ivar down: to the narrow layer and, below it, to the streams' weights (without them for the model's output).
    :ivar up: back to one gate for every element.
    """

    backend: Backend
    streams: int
    norm: Array
    eps: float
    down: Array
    up: Array

    @classmethod
    def load(
        cls,
        source: WeightSource,
        backend: Backend,
        prefix: str,
        *,
        streams: int,
        width: int,
        rank: int,
        eps: float,
        injects: bool = True,
    ) -> StreamMixer:
        """
        :param prefix: of the tensors' names, such as ``blk.0.hc_attn_``.
        :param injects: whether a layer's result goes back to the streams.
        :raises ModelFileError: a tensor is missing or has another shape.
        """
        whole = streams * width
        down = [source.require(prefix + "down.weight", (rank, whole))]
        if injects:
            down.append(source.require(prefix + "inject.weight", (streams, whole)))
        return cls(
            backend=backend,
            streams=streams,
            norm=backend.vector(source.require(prefix + "norm.weight", (whole,))),
            eps=eps,
            down=backend.matrix(*down),
            up=backend.matrix(source.require(prefix + "up.weight", (whole, rank))),
        )

    def mix(self, x: Array) -> tuple[Array, Array | None]:
        """The layer's input ``(rows, width)``, and the streams' weights ``(rows, streams)`` for its result."""
        b, n = self.backend, self.streams
        normed = b.group_norm(x, self.norm, n, self.eps)
        narrow, *weights = b.linear_split(normed, self.down)
        gates = b.linear(b.activate(b.scale(narrow, 1 / n), "silu"), self.up)
        mixed = b.fold(b.multiply(b.activate(gates, "sigmoid"), normed), n)
        injected = b.scale(b.activate(b.scale(weights[0], 1 / n), "sigmoid"), 2) if weights else None
        return b.scale(mixed, 1 / n), injected

    def inject(self, x: Array, y: Array, weights: Array) -> Array:
        """``x`` with a layer's result ``(rows, width)`` added to every stream; may reuse the memory of ``x``."""
        b = self.backend
        return b.add(x, b.multiply(b.repeat(y, self.streams), weights))
