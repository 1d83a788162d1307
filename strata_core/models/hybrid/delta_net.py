"""A gated delta net (Yang et al. 2024) as Qwen3-Next and its successors have it.

q, k and v go through a causal convolution and SiLU, q and k are L2-normed, the gated delta rule is applied, and
what comes of it is RMS-normed per head, gated and projected. Names and order of the tensors are those of llama.cpp's
converter: ``ssm_a`` is ``-exp(A_log)``, and where an architecture's value heads are *tiled*, value head ``h`` belongs
to key head ``h % key_heads`` rather than ``h // (value_heads // key_heads)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from strata_core.compute.base import Array, Backend, DeltaSpec
from strata_core.models.hybrid.sizes import HybridSizes, conv_channels

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

#: Of the L2 norm of q and k; a constant of the models' own code.
L2_EPS = 1e-6


@attrs.frozen(eq=False)
class DeltaNet:
    """One layer. Weights are the backend's arrays.

    :ivar spec: as the file has it; :ivar tiled: see the module's docstring.
    :ivar projections: all that is projected from the layer's input, stacked; :ivar grouped: in the order in which
        Qwen3-Next has it, see :meth:`_project`.
    :ivar gate: activation of the output gate.
    :ivar conv_state: (state store, number) of the convolution's state; :ivar delta_state: of the heads'.
    """

    backend: Backend
    spec: DeltaSpec
    tiled: bool
    projections: Array
    grouped: str
    conv: Array
    decay: Array
    step_bias: Array
    norm: Array
    eps: float
    gate: str
    output: Array
    conv_state: tuple[int, int]
    delta_state: tuple[int, int]

    @classmethod
    def load(
        cls,
        source: WeightSource,
        backend: Backend,
        sizes: HybridSizes,
        number: int,
        states: tuple[int, int],
        *,
        tiled: bool,
        gate: str = "silu",
    ) -> DeltaNet:
        """
        :param states: (number of the state store, number of the layer's first state in it).
        :raises ModelFileError: a tensor is missing or has another shape.
        """
        d, width, prefix = sizes.delta, sizes.width, f"blk.{number}."
        inner, heads = d.value_heads * d.value_dim, d.value_heads
        shapes, grouped = {"attn_qkv": conv_channels(d), "attn_gate": inner, "ssm_beta": heads, "ssm_alpha": heads}, ""
        if source.get(prefix + "ssm_ba.weight") is not None:
            del shapes["ssm_beta"], shapes["ssm_alpha"]
            shapes["ssm_ba"], grouped = 2 * heads, "ba"
        if source.get(prefix + "ssm_in.weight") is not None:
            shapes, grouped = {"ssm_in": conv_channels(d) + inner, "ssm_ba": 2 * heads}, "qkvz"
        return cls(
            backend=backend,
            spec=d,
            tiled=tiled,
            projections=backend.matrix(
                *(source.require(f"{prefix}{name}.weight", (rows, width)) for name, rows in shapes.items())
            ),
            grouped=grouped,
            conv=backend.vector(source.require(prefix + "ssm_conv1d.weight", (conv_channels(d), sizes.kernel))),
            decay=backend.vector(source.require(prefix + "ssm_a", (heads,))),
            step_bias=backend.vector(source.require(prefix + "ssm_dt.bias", (heads,))),
            norm=backend.vector(source.require(prefix + "ssm_norm.weight", (d.value_dim,))),
            eps=sizes.decoder.eps,
            gate=gate,
            output=backend.matrix(source.require(prefix + "ssm_out.weight", (width, inner))),
            conv_state=states,
            delta_state=(states[0], states[1] + 1),
        )

    def forward(self, step: Any, x: Array) -> Array:
        """``(rows, width)`` to ``(rows, width)``; moves the states on by the step's rows."""
        b, d = self.backend, self.spec
        qkv, z, beta, alpha = self._project(x)
        qkv = b.activate(b.causal_conv(step, self.conv_state, qkv, self.conv), "silu")
        keys = d.key_heads * d.key_dim
        q, k, v = b.split(qkv, [keys, keys, d.value_heads * d.value_dim])
        q = b.scale(b.l2_norm(q, d.key_dim, L2_EPS), d.key_dim**-0.5)
        k = b.l2_norm(k, d.key_dim, L2_EPS)
        if self.tiled and d.key_heads != d.value_heads:
            times = d.value_heads // d.key_heads
            q, k, d = b.repeat(q, times), b.repeat(k, times), attrs.evolve(d, key_heads=d.value_heads)
        beta = b.activate(beta, "sigmoid")
        decay = b.multiply(b.activate(b.shift(alpha, self.step_bias), "softplus"), self.decay)
        y = b.gated_delta(step, self.delta_state, q, k, v, decay, beta, d)
        y = b.rms_norm(y, self.norm, self.eps)
        return b.linear(b.multiply(b.activate(z, self.gate), y), self.output)

    def _project(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """q with k and v; z; beta and alpha before their activations.

        Qwen3-Next keeps what belongs to a key head together, in ``ssm_ba`` beta and alpha of its value heads, and in
        files of early converters also its q, k, v and z, in ``ssm_in``.
        """
        b, d = self.backend, self.spec
        parts = b.linear_split(x, self.projections)
        if not self.grouped:
            qkv, z, beta, alpha = parts
            return qkv, z, beta, alpha
        per = d.value_heads // d.key_heads
        beta, alpha = b.split(parts[-1], [per, per], heads=d.key_heads)
        if self.grouped == "ba":
            return parts[0], parts[1], beta, alpha
        widths = [d.key_dim, d.key_dim, per * d.value_dim, per * d.value_dim]
        q, k, v, z = b.split(parts[0], widths, heads=d.key_heads)
        return b.join([q, k, v]), z, beta, alpha
