"""Sizes and constants of hybrid models, read from the metadata and checked."""

from __future__ import annotations

import attrs

from strata_core.compute.base import AttentionSpec, DeltaSpec, Rotation
from strata_core.models.base import ModelOptions
from strata_core.models.config import DecoderConfig, identity_of
from strata_core.models.keys import Keys
from strata_core.models.mtp import Depth
from strata_core.pool.layout import PageLayout

#: Sections of the rotation tell apart a picture's positions in time, height and width. Of text all three are the same,
#: so that it turns as without sections.
_ROPE_KEYS = ("dimension_sections",)


@attrs.frozen
class HybridSizes:
    """Sizes of a model in which every ``interval``-th layer attends and the others are gated delta nets.

    Layers that predict further tokens, which files count as their last ones, are not counted here.

    :ivar decoder: the sizes that other decoders have too; its heads are those of the layers that attend.
    :ivar kernel: width of the delta nets' convolution.
    :ivar further: how many layers that predict further tokens are used, 0 or 1.
    """

    decoder: DecoderConfig
    interval: int
    delta: DeltaSpec
    kernel: int
    further: int

    @classmethod
    def read(cls, keys: Keys, options: ModelOptions) -> HybridSizes:
        """
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a rotation that is not known.
        """
        decoder = DecoderConfig.read(keys, options, rope_keys=_ROPE_KEYS)
        depth = Depth.read(keys, options.further)
        decoder = attrs.evolve(decoder, layers=depth.layers)
        interval = keys.size("full_attention_interval", 4)
        if interval > decoder.layers:
            raise keys.wrong("full_attention_interval", f"none of {decoder.layers} layers attends")
        key_heads, value_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
        if value_heads % key_heads:
            raise keys.wrong("ssm.time_step_rank", f"so many value heads cannot share {key_heads} key heads evenly")
        inner = keys.size("ssm.inner_size")
        if inner % value_heads:
            raise keys.wrong("ssm.inner_size", f"it is not a multiple of {value_heads} value heads")
        delta = DeltaSpec(key_heads, value_heads, keys.size("ssm.state_size"), inner // value_heads)
        return cls(decoder, interval, delta, keys.size("ssm.conv_kernel"), depth.further)

    @property
    def feed_forwards(self) -> range:
        """Numbers of the layers that are loaded, all of which have a feed-forward."""
        return range(self.decoder.layers + self.further)

    @property
    def width(self) -> int:
        return self.decoder.width

    @property
    def attention(self) -> AttentionSpec:
        d = self.decoder
        return AttentionSpec(d.heads, d.kv_heads, d.head_dim, d.value_dim, d.attention_scale)

    def attends(self, number: int) -> bool:
        """Whether a layer of the model itself attends; it is a gated delta net otherwise."""
        return (number + 1) % self.interval == 0

    def layout(self, kv_type: str, page_tokens: int, index_dim: int | None = None) -> PageLayout:
        """Pages of the layers that attend; last comes the one that predicts further tokens."""
        d = self.decoder
        return PageLayout.attention(
            layers=d.layers // self.interval + self.further,
            kv_heads=d.kv_heads,
            head_dim=d.head_dim,
            value_dim=d.value_dim,
            index_dim=index_dim,
            kv_type=kv_type,
            page_tokens=page_tokens,
        )

    def states(self) -> list[tuple[str, int, int]]:
        """Parts of a state page: of every delta net its convolution's, then its heads'."""
        d = self.delta
        parts = []
        for number in range(self.decoder.layers):
            if not self.attends(number):
                parts.append((f"conv.{number}", 1, (self.kernel - 1) * conv_channels(d)))
                parts.append((f"delta.{number}", d.value_heads, d.key_dim * d.value_dim))
        return parts

    def identity(self, architecture: str, rotation: Rotation) -> dict[str, str | int | float]:
        """What changes K/V and states beside the weights."""
        facts = identity_of(architecture, self.decoder, rope=rotation)
        facts |= {"interval": self.interval, "conv_kernel": self.kernel, "delta": repr(self.delta)}
        return facts | ({"mtp": self.further} if self.further else {})  # by the name that users know


def conv_channels(delta: DeltaSpec) -> int:
    """Queries, keys and values go through the convolution together."""
    return 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
