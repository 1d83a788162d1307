"""Taking weights into a backend by their GGUF names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from strata_core.compute.base import Array, Backend
from strata_core.errors import ModelFileError
from strata_core.experts import ExpertTensors
from strata_core.weights.tensor import StoredTensor

if TYPE_CHECKING:
    from strata_core.models.config import DecoderConfig
    from strata_core.weights.quant.base import Bytes
    from strata_core.weights.source import WeightSource


@attrs.frozen(eq=False)
class Ends:
    """What comes before and after a model's layers; where the two tables are one, it is taken in once."""

    embedding: Array
    norm: Array
    output: Array
    vocab: int

    @classmethod
    def load(cls, source: WeightSource, backend: Backend, width: int) -> Ends:
        """:raises ModelFileError: a tensor is missing or of another shape."""
        table = source.require("token_embd.weight")
        if len(table.shape) != 2 or table.shape[1] != width:
            raise ModelFileError(
                f"{source.path}: tensor token_embd.weight has shape {table.shape}, not (vocabulary, {width})",
                param="token_embd.weight",
            )
        vocab = table.shape[0]
        if source.get("output.weight") is None:
            embedding = output = backend.matrix(table)
        else:
            embedding = backend.table(table)
            output = backend.matrix(source.require("output.weight", (vocab, width)))
        return cls(embedding, backend.vector(source.require("output_norm.weight", (width,))), output, vocab)


@attrs.frozen(eq=False)
class Block:
    """The weights of one layer: names are those behind ``blk.N.``.

    :raises ModelFileError: from all methods: a tensor is missing or of another shape.
    """

    source: WeightSource
    backend: Backend
    number: int

    def tensor(self, name: str, *shape: int) -> StoredTensor:
        return self.source.require(f"blk.{self.number}.{name}", shape)

    def has(self, name: str) -> bool:
        return f"blk.{self.number}.{name}" in self.source.tensors

    def vector(self, name: str, *shape: int) -> Array:
        return self.backend.vector(self.tensor(name, *shape))

    def optional(self, name: str, *shape: int) -> Array | None:
        """A vector, or None where the file has no tensor of that name."""
        return self.vector(name, *shape) if self.has(name) else None

    def matrix(self, width: int, **rows: int) -> Array:
        """Matrices of these names and rows, stacked."""
        return self.backend.matrix(*(self.tensor(f"{name}.weight", n, width) for name, n in rows.items()))

    def qkv(self, c: DecoderConfig) -> tuple[Array, tuple[Array | None, Array | None, Array | None]]:
        """The three projections, and their biases where there are any."""
        q, k, v = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.value_dim
        biases = self.optional("attn_q.bias", q), self.optional("attn_k.bias", k), self.optional("attn_v.bias", v)
        return self.matrix(c.width, attn_q=q, attn_k=k, attn_v=v), biases

    def experts(self, count: int, ffn: int, width: int) -> ExpertTensors:
        """The experts' stacks, with biases where there are any."""
        biased = self.has("ffn_down_exps.bias")
        return ExpertTensors(
            gate=self.tensor("ffn_gate_exps.weight", count, ffn, width),
            up=self.tensor("ffn_up_exps.weight", count, ffn, width),
            down=self.tensor("ffn_down_exps.weight", count, width, ffn),
            gate_up_bias=_side_by_side(
                self.tensor("ffn_gate_exps.bias", count, ffn), self.tensor("ffn_up_exps.bias", count, ffn)
            )
            if biased
            else None,
            down_bias=self.tensor("ffn_down_exps.bias", count, width) if biased else None,
        )


def _side_by_side(left: StoredTensor, right: StoredTensor) -> StoredTensor:
    """Two matrices of equal height as one of both widths, in float32."""

    def read(start: int, stop: int) -> Bytes:
        both = np.concatenate([left.dequantise(slice(start, stop)), right.dequantise(slice(start, stop))], axis=1)
        return np.ascontiguousarray(both).reshape(-1).view(np.uint8)

    return StoredTensor(f"{left.name}+{right.name}", (left.shape[0], left.shape[1] + right.shape[1]), "F32", read)
