"""The ``llama`` family: pre-norm decoder, rotary grouped-query attention, gated SiLU (Touvron et al. 2023).

Covers what GGUF calls architecture ``llama``: Llama 1 to 3, SmolLM and others. The rows of ``attn_q`` and ``attn_k`` of
such files are in the order in which a rotated pair is two neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from strata_core.compute.base import (
    Array,
    AttentionSpec,
    Backend,
    Batch,
    Decoder,
    DecoderLayer,
    PageStore,
    Rotation,
)
from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.models.base import Family, Geometry, Model, ModelOptions
from strata_core.models.rope import Rope, read_rope
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "llama"

#: Keys below ``llama.attention.`` that are applied, or (``layer_norm_epsilon``, a causal mask) change nothing here.
_ATTENTION_KEYS = {
    "head_count",
    "head_count_kv",
    "key_length",
    "value_length",
    "layer_norm_rms_epsilon",
    "layer_norm_epsilon",
    "scale",
}
#: Keys that change the arithmetic in ways this family does not do, with the value that asks for nothing.
_REFUSED: Mapping[str, float | bool] = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "swin_norm": False,
    "embedding_length_per_layer_input": 0,
    "attention.causal": True,
}


@attrs.frozen
class LlamaConfig:
    """Sizes and constants of one model, read and checked.

    :ivar attention_scale: factor on the scores.
    :ivar embedding_scale: factor on embedding rows.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: int
    eps: float
    attention_scale: float
    embedding_scale: float
    rope: Rope

    @classmethod
    def read(cls, source: WeightSource, options: ModelOptions) -> LlamaConfig:
        """
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a key asks for what this family does not do.
        """
        _refuse(source)

        def size(name: str, default: int | None = None) -> int:
            key = f"{ARCHITECTURE}.{name}"
            value = source.require_key(key, int) if default is None else source.key(key, default)
            if value < 1:
                raise ModelFileError(f"{source.path}: {key} is {value}; it must be at least 1", param=key)
            return value

        width, heads = size("embedding_length"), size("attention.head_count")
        kv_heads = size("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise ModelFileError(
                f"{source.path}: {heads} attention heads cannot share {kv_heads} K/V heads evenly",
                param=f"{ARCHITECTURE}.attention.head_count_kv",
            )
        if width % heads and f"{ARCHITECTURE}.attention.key_length" not in source.metadata:
            raise ModelFileError(
                f"{source.path}: width {width} is not a multiple of {heads} heads, and the file has no key_length",
                param=f"{ARCHITECTURE}.attention.head_count",
            )
        head_dim = size("attention.key_length", max(1, width // heads))
        context = size("context_length")
        rope = read_rope(source, ARCHITECTURE, head_dim=head_dim, context=context, options=options)
        if options.rope_scale is not None:
            context = int(rope.scaling.original_context * options.rope_scale)
        scale = source.key(f"{ARCHITECTURE}.attention.scale", 0.0)
        return cls(
            layers=size("block_count"),
            width=width,
            ffn=size("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=size("attention.value_length", head_dim),
            context=context,
            eps=source.require_key(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float),
            attention_scale=scale or head_dim**-0.5,
            embedding_scale=source.key(f"{ARCHITECTURE}.embedding_scale", 0.0) or 1.0,
            rope=rope,
        )


def _load_layer(
    source: WeightSource, backend: Backend, c: LlamaConfig, number: int, rotation: Rotation, spec: AttentionSpec
) -> DecoderLayer:
    prefix = f"blk.{number}."
    q, k, v = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.value_dim

    def bias(name: str, rows: int) -> Array | None:
        name = f"{prefix}{name}.bias"
        return None if source.get(name) is None else backend.vector(source.require(name, (rows,)))

    return DecoderLayer(
        attention_norm=backend.vector(source.require(prefix + "attn_norm.weight", (c.width,))),
        qkv=backend.matrix(
            source.require(prefix + "attn_q.weight", (q, c.width)),
            source.require(prefix + "attn_k.weight", (k, c.width)),
            source.require(prefix + "attn_v.weight", (v, c.width)),
        ),
        qkv_biases=(bias("attn_q", q), bias("attn_k", k), bias("attn_v", v)),
        rotation=rotation,
        spec=spec,
        cache=(0, number),
        output=backend.matrix(source.require(prefix + "attn_output.weight", (c.width, c.heads * c.value_dim))),
        output_bias=bias("attn_output", c.width),
        ffn_norm=backend.vector(source.require(prefix + "ffn_norm.weight", (c.width,))),
        gate_up=backend.matrix(
            source.require(prefix + "ffn_gate.weight", (c.ffn, c.width)),
            source.require(prefix + "ffn_up.weight", (c.ffn, c.width)),
        ),
        down=backend.matrix(source.require(prefix + "ffn_down.weight", (c.width, c.ffn))),
        activation="silu",
        eps=c.eps,
    )


class LlamaModel(Model):
    """See the module's docstring. One kind of pages: full attention."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        c = self._config = LlamaConfig.read(source, options)
        self._backend = backend
        embedding = source.require("token_embd.weight")
        if len(embedding.shape) != 2 or embedding.shape[1] != c.width:
            raise ModelFileError(
                f"{source.path}: tensor token_embd.weight has shape {embedding.shape}, not (vocabulary, {c.width})",
                param="token_embd.weight",
            )
        vocab = embedding.shape[0]
        if source.get("output.weight") is None:
            output = self._embedding = backend.matrix(embedding)
        else:
            self._embedding = backend.table(embedding)
            output = backend.matrix(source.require("output.weight", (vocab, c.width)))
        rotation = self._rotation = c.rope.rotation(interleaved=True)
        spec = AttentionSpec(c.heads, c.kv_heads, c.head_dim, c.value_dim, c.attention_scale)
        layers = tuple(_load_layer(source, backend, c, number, rotation, spec) for number in range(c.layers))
        norm = backend.vector(source.require("output_norm.weight", (c.width,)))
        self._decoder = Decoder(layers, norm, c.eps, output)
        self.geometry = Geometry(ARCHITECTURE, c.layers, c.width, vocab, c.context)

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        c = self._config
        layout = PageLayout.attention(
            layers=c.layers,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            value_dim=c.value_dim,
            kv_type=kv_type,
            page_tokens=page_tokens,
        )
        return (layout,)

    def identity(self) -> Mapping[str, str | int | float]:
        c, rotation = self._config, self._rotation
        return {
            "architecture": ARCHITECTURE,
            "layers": c.layers,
            "width": c.width,
            "ffn": c.ffn,
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "value_dim": c.value_dim,
            "eps": c.eps,
            "attention_scale": c.attention_scale,
            "embedding_scale": c.embedding_scale,
            # The frequencies themselves: whatever key, tensor or override they came from.
            "rope": hashlib.blake2b(rotation.inverse_frequencies.astype("<f4").tobytes(), digest_size=16).hexdigest(),
            "rope_magnitude": rotation.magnitude,
        }

    def forward(self, batch: Batch, stores: Sequence[PageStore]) -> np.ndarray:
        b = self._backend
        step = b.begin(batch, stores)
        x = b.embed(step, self._embedding, self._config.embedding_scale)
        logits = b.decode(step, x, self._decoder, len(batch.outputs))
        return np.empty((0, self.geometry.vocab), np.float32) if logits is None else b.to_host(logits)


def _refuse(source: WeightSource) -> None:
    for name, neutral in _REFUSED.items():
        key = f"{ARCHITECTURE}.{name}"
        value = source.metadata.get(key, neutral)
        if value != neutral:
            raise UnsupportedModel(f"{source.path}: {key} = {value} is not supported by the llama family", param=key)
    prefix = f"{ARCHITECTURE}.attention."
    for key, value in source.metadata.items():
        name = key[len(prefix) :]
        if not key.startswith(prefix) or name in _ATTENTION_KEYS or f"attention.{name}" in _REFUSED:
            continue
        if np.any(np.asarray(value)):  # zero and empty ask for nothing
            raise UnsupportedModel(f"{source.path}: {key} = {value} is not supported by the llama family", param=key)


FAMILY = Family(ARCHITECTURE, (ARCHITECTURE,), LlamaModel)
