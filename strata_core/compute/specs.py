"""Shapes and variants of layers, and layers with the weights a backend has taken in."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

#: A backend's own array type. Only the backend looks inside; others pass it on.
Array = Any


@attrs.frozen(eq=False)
class Rotation:
    """Rotary position embedding of one kind of layer.

    :ivar inverse_frequencies: float32 ``(rotated / 2,)``: angle per position of each pair, all scaling applied.
    :ivar interleaved: pairs are elements ``(2i, 2i + 1)`` if true, ``(i, i + rotated / 2)`` ("NeoX") otherwise.
    :ivar magnitude: factor on the rotated elements (YaRN's attention factor); 1.0 for none.
    """

    inverse_frequencies: np.ndarray
    interleaved: bool
    magnitude: float = 1.0

    @property
    def rotated(self) -> int:
        """How many leading elements of a head are rotated; the rest pass through."""
        return 2 * len(self.inverse_frequencies)


@attrs.frozen
class AttentionSpec:
    """Shape and variant of an attention layer: ``softmax(scale * q k^T) v`` over positions ``<= `` the row's own.

    :ivar scale: factor on the scores, usually ``head_dim ** -0.5``.
    :ivar window: only the last ``window`` positions (the row's own included) are attended; None for all.
    :ivar softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; None for none.
    :ivar latent: the value of a position is the first ``value_dim`` elements of its key (multi-head latent attention
        with its projections absorbed, DeepSeek-AI 2024): pages hold keys only, of a layout made with ``latent=True``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    latent: bool = False


@attrs.frozen(eq=False)
class DecoderLayer:
    """A pre-norm layer: attention, then a gated MLP, each added to its input. Weights are the backend's arrays.

    :ivar qkv: the three projections, stacked; :ivar qkv_biases: a bias or None for each.
    :ivar q_norm: weight of a norm of every query head before its rotation, or None; :ivar k_norm: the same of keys.
    :ivar cache: (number of the page layout, number of the layer within it), as in :meth:`Backend.attention`.
    :ivar gate_up: the two matrices, stacked in this order.
    :ivar eps: of all norms.
    """

    attention_norm: Array
    qkv: Array
    qkv_biases: tuple[Array | None, Array | None, Array | None]
    rotation: Rotation
    spec: AttentionSpec
    cache: tuple[int, int]
    output: Array
    output_bias: Array | None
    ffn_norm: Array
    gate_up: Array
    down: Array
    activation: str
    eps: float
    q_norm: Array | None = None
    k_norm: Array | None = None


@attrs.frozen(eq=False)
class Decoder:
    """Everything between embedded rows and logits: at least one layer, the last norm, the output projection."""

    layers: tuple[DecoderLayer, ...]
    norm: Array
    eps: float
    output: Array


@attrs.frozen(eq=False)
class Indexer:
    """What chooses the positions that a row of sparse attention attends (Qwen4-Exp).

    Positions are taken in blocks of ``block``. A complete block's key is the mean of its positions' index keys, RMS
    normed and rotated as at its first position; its score is the sum over index heads of ``relu(query . key)``, divided
    by ``sqrt(dim)``. A row attends the ``top`` complete blocks of the highest scores (ties: the earlier block), and
    those positions up to its own that are in no complete block. A block is complete for a row when its last position is
    not after the row's own.

    :ivar heads: index queries of a row; :ivar dim: width of an index query or key.
    :ivar key_norm: weight of the norm, from :meth:`Backend.vector`; :ivar eps: of it.
    :ivar rotation: of block keys; queries come rotated.
    """

    heads: int
    dim: int
    block: int
    top: int
    key_norm: Array
    eps: float
    rotation: Rotation


@attrs.frozen
class DeltaSpec:
    """Shape of a gated delta rule layer (Yang et al. 2024): ``value_heads`` states of ``key_dim x value_dim``.

    Value head ``h`` uses key head ``h // (value_heads // key_heads)``.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@attrs.frozen(eq=False)
class Router:
    """How a mixture-of-experts layer chooses experts for a row.

    :ivar weight: matrix ``(experts, width)``; :ivar bias: added to its product, or None.
    :ivar scoring: ``softmax`` (over all experts, then the best are taken), ``sigmoid``, or ``softmax_top`` (the best
        are taken, then softmax over them).
    :ivar top: experts of a row.
    :ivar normalise: the chosen weights are divided by their sum; :ivar scale: and multiplied with this.
    :ivar correction: vector added to the scores for choosing only, not for weighting (DeepSeek-V3), or None.
    :ivar groups: experts are in so many equal groups, of which the ``top_groups`` with the highest sums of their two
        best scores take part; 1 for no groups.
    """

    weight: Array
    top: int
    scoring: str = "softmax"
    bias: Array | None = None
    normalise: bool = True
    scale: float = 1.0
    correction: Array | None = None
    groups: int = 1
    top_groups: int = 1


@attrs.frozen
class ExpertSpec:
    """What an expert computes: ``down(act(gate(x)) * up(x))``, biases included where there are any.

    :ivar activation: as in :meth:`Backend.gated`, or ``swiglu_oai``: gate and up are clamped, then
        ``gate * sigmoid(1.702 * gate) * (up + 1)`` (gpt-oss).
    :ivar limit: of that clamp: ``gate <= limit``, ``-limit <= up <= limit``.
    """

    activation: str = "silu"
    limit: float = 7.0
