"""Sizes and constants that decoders with grouped-query attention have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import attrs

from strata_core.compute.base import Rotation
from strata_core.models.base import ModelOptions
from strata_core.models.keys import Keys
from strata_core.models.rope import Rope, read_rope
from strata_core.pool.layout import PageLayout

#: Fields that do not change keys and values, and the rotation, which goes in by its frequencies.
_NOT_IDENTITY = {"context", "rope"}


@attrs.frozen
class DecoderConfig:
    """Read and checked.

    :ivar ffn: width of a dense layer's inner product; 0 where the file says nothing of one.
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
    def read(
        cls, keys: Keys, options: ModelOptions, *, rope_keys: Collection[str] = (), yarn_truncate: bool = True
    ) -> DecoderConfig:
        """
        :param rope_keys: keys below ``rope.`` that the family applies itself.
        :param yarn_truncate: whether the architecture's yarn rounds its bounds to whole pairs.
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a rotation that is not known.
        """
        width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        kv_heads = keys.size("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise keys.wrong("attention.head_count_kv", f"{heads} attention heads cannot share them evenly")
        if width % heads and "attention.key_length" not in keys:
            raise keys.wrong(
                "attention.head_count", f"width {width} is not a multiple of it, and the file has no key_length"
            )
        head_dim = keys.size("attention.key_length", max(1, width // heads))
        context = keys.size("context_length")
        rope = read_rope(
            keys.source,
            keys.architecture,
            head_dim=head_dim,
            context=context,
            options=options,
            applied=rope_keys,
            yarn_truncate=yarn_truncate,
        )
        if options.rope_scale is not None:
            context = int(rope.scaling.original_context * options.rope_scale)
        return cls(
            layers=keys.size("block_count"),
            width=width,
            ffn=keys.count("feed_forward_length", 0),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=keys.size("attention.value_length", head_dim),
            context=context,
            eps=keys.number("attention.layer_norm_rms_epsilon"),
            attention_scale=keys.number("attention.scale", 0.0) or head_dim**-0.5,
            embedding_scale=keys.number("embedding_scale", 0.0) or 1.0,
            rope=rope,
        )

    def layout(self, layers: int, kv_type: str, page_tokens: int, kind: str = "full") -> PageLayout:
        """Pages of ``layers`` of its layers."""
        return PageLayout.attention(
            layers=layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            kv_type=kv_type,
            page_tokens=page_tokens,
            kind=kind,
        )


def identity_of(
    architecture: str, *configs: attrs.AttrsInstance, **rotations: Rotation
) -> dict[str, str | int | float]:
    """What :meth:`Model.identity` returns: all fields of the attrs instances, and the rotations by name."""
    out: dict[str, str | int | float] = {"architecture": architecture}
    for config in configs:
        for field in attrs.fields(type(config)):
            value = getattr(config, field.name)
            if field.name not in _NOT_IDENTITY:
                out[field.name] = value if isinstance(value, (str, int, float)) else repr(value)
    for name, rotation in rotations.items():
        # The frequencies themselves: whatever key, tensor or override they came from.
        digest = hashlib.blake2b(rotation.inverse_frequencies.astype("<f4").tobytes(), digest_size=16)
        out[name] = digest.hexdigest()
        out[f"{name}_magnitude"] = rotation.magnitude
    return out
