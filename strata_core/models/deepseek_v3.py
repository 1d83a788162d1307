"""The ``deepseek_v3`` family: multi-head latent attention, experts beside shared ones (DeepSeek-AI 2024).

What a position keeps is one latent row and one rotated key, shared by all heads. The matrices that would expand the
latent row into keys and values of heads (``attn_k_b``, ``attn_v_b``) are applied to queries and to what they attended
instead, which is the same by associativity and leaves attention over the rows as they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from strata_core.compute.base import Array, AttentionSpec, Backend, ExpertSpec, Rotation, Router
from strata_core.experts import ExpertSource, ResidentExperts
from strata_core.models.base import Family, Geometry, ModelOptions
from strata_core.models.config import identity_of
from strata_core.models.keys import Keys
from strata_core.models.loading import Block, Ends
from strata_core.models.mtp import Depth, Entrance, FurtherLayer, PlainPredictor, embedding_of, output_of, write_only
from strata_core.models.rope import Rope, read_rope
from strata_core.models.stack import FeedForward, GatedFeedForward, Layer, MixtureFeedForward, StackModel
from strata_core.pool.layout import PageLayout

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "deepseek2"

#: Values of ``expert_gating_func``.
_SCORINGS = {1: "softmax", 2: "sigmoid"}


@attrs.frozen
class LatentConfig:
    """Sizes of latent attention.

    :ivar query_rank: width of the queries' own latent row; 0 where they are projected at once.
    :ivar rank: width of the latent row; :ivar rotated: of the rotated part of a key.
    :ivar plain: width of the part of a head's key that is not rotated; :ivar value_dim: of its value.
    :ivar magnitude: factor on rotated elements.
    :ivar further: how many layers that predict further tokens are used, 0 or 1.
    """

    layers: int
    width: int
    heads: int
    query_rank: int
    rank: int
    rotated: int
    plain: int
    value_dim: int
    context: int
    eps: float
    scale: float
    magnitude: float
    rope: Rope
    further: int

    @classmethod
    def read(cls, keys: Keys, options: ModelOptions) -> LatentConfig:
        """
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a rotation that is not known.
        """
        source, context = keys.source, keys.size("context_length")
        rotated, rank = keys.size("rope.dimension_count"), keys.size("attention.kv_lora_rank")
        key = keys.size("attention.key_length_mla")
        if key <= rotated:
            raise keys.wrong("attention.key_length_mla", f"{rotated} elements of it are rotated")
        for name, expected in ("key_length", rank + rotated), ("value_length", rank), ("head_count_kv", 1):
            if keys.size(f"attention.{name}", expected) != expected:
                raise keys.wrong(f"attention.{name}", f"latent attention needs {expected}")
        applied = ("scaling.yarn_log_multiplier",)
        rope = read_rope(
            source, ARCHITECTURE, head_dim=rotated, context=context, options=options, applied=applied
        )
        if options.rope_scale is not None:
            context = int(rope.scaling.original_context * options.rope_scale)
        grown, magnitude = _stretching(keys, rope)
        depth = Depth.read(keys, options.further)
        return cls(
            layers=depth.layers,
            width=keys.size("embedding_length"),
            heads=keys.size("attention.head_count"),
            query_rank=keys.count("attention.q_lora_rank", 0),
            rank=rank,
            rotated=rotated,
            plain=key - rotated,
            value_dim=keys.size("attention.value_length_mla"),
            context=context,
            eps=keys.number("attention.layer_norm_rms_epsilon"),
            scale=key**-0.5 * grown**2,
            magnitude=magnitude,
            rope=rope,
            further=depth.further,
        )


def _stretching(keys: Keys, rope: Rope) -> tuple[float, float]:
    """What yarn's temperature multiplies: queries and keys as a whole, and the rotated elements.

    ``yarn_log_multiplier`` is a tenth of the model's ``mscale_all_dim``; where it is given, all elements are scaled by
    it, and the rotated ones by more only if the file says so.
    """
    magnitude = rope.rotation(interleaved=True).magnitude
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope.scaling.kind != "yarn" or not multiplier:
        return 1.0, magnitude
    grown = 1 + multiplier * math.log(rope.scaling.factor) if rope.scaling.factor > 1 else 1.0
    return grown, magnitude if "rope.scaling.attn_factor" in keys else 1.0


@attrs.frozen
class MixtureConfig:
    """Of the experts; the first ``dense`` layers have a gated MLP of width ``ffn`` instead.

    :ivar shared: experts that every row uses, as one of so many times the width.
    """

    ffn: int
    dense: int
    experts: int
    top: int
    expert_ffn: int
    shared: int
    scoring: str
    normalise: bool
    weights_scale: float
    groups: int
    top_groups: int

    @classmethod
    def read(cls, keys: Keys, layers: int) -> MixtureConfig:
        """
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a way of choosing experts that is not known.
        """
        dense, experts = keys.count("leading_dense_block_count", 0), keys.count("expert_count", 0)
        if dense > layers or not experts:
            dense = layers
        gating = keys.count("expert_gating_func", 1)  # files from before there was a choice
        groups = keys.size("expert_group_count", 1)
        top_groups = keys.size("expert_group_used_count", groups)
        if gating not in _SCORINGS:
            raise keys.unsupported("expert_gating_func")
        if groups > 1 and (_SCORINGS[gating] != "sigmoid" or experts % groups):
            raise keys.unsupported("expert_group_count")  # DeepSeek-V2 ranks groups in another way
        top = keys.size("expert_used_count") if experts else 0
        if top > experts // groups * min(top_groups, groups):
            raise keys.wrong("expert_used_count", f"{experts // groups * min(top_groups, groups)} experts take part")
        return cls(
            ffn=keys.size("feed_forward_length"),
            dense=dense,
            experts=experts,
            top=top,
            expert_ffn=keys.size("expert_feed_forward_length") if experts else 0,
            shared=keys.count("expert_shared_count", 0),
            scoring=_SCORINGS[gating],
            normalise=keys.flag("expert_weights_norm", False),
            weights_scale=keys.number("expert_weights_scale", 1.0) or 1.0,
            groups=groups,
            top_groups=min(top_groups, groups),
        )

    def mixes(self, number: int) -> bool:
        """Whether a layer has experts."""
        return self.experts > 0 and number >= self.dense


@attrs.frozen(eq=False)
class LatentAttention:
    """See the module's docstring.

    :ivar down: projections to the queries' latent row (or at once to queries) and to the latent row and rotated key.
    :ivar query_norm: of the queries' latent row, and :ivar query: the matrix after it; None without one.
    :ivar keys: for each head, from its unrotated query to the latent row; :ivar values: from there to its value.
    """

    config: LatentConfig
    down: Array
    query_norm: Array | None
    query: Array | None
    norm: Array
    keys: Array
    values: Array
    rotation: Rotation
    spec: AttentionSpec
    number: int
    output: Array

    def attend(self, b: Backend, step: Any, x: Array) -> Array:
        c = self.config
        q, latent = b.linear_split(x, self.down)
        if self.query is not None:
            q = b.linear(b.rms_norm(q, self.query_norm, c.eps), self.query)
        q_plain, q_rotated = b.split(q, (c.plain, c.rotated), c.heads)
        q_rotated = b.rope(step, q_rotated, self.rotation, c.heads)
        q = b.join([b.head_linear(q_plain, self.keys), q_rotated], c.heads)
        return b.attention(step, (0, self.number), q, self.row(b, step, latent), None, self.spec)

    def row(self, b: Backend, step: Any, latent: Array) -> Array:
        """What a position keeps, of what is projected to it."""
        c = self.config
        latent, k_rotated = b.split(latent, (c.rank, c.rotated))
        k_rotated = b.rope(step, k_rotated, self.rotation, 1)
        return b.join([b.rms_norm(latent, self.norm, c.eps), k_rotated])

    def project(self, b: Backend, attended: Array) -> Array:
        return b.linear(b.head_linear(attended, self.values), self.output)


@attrs.frozen(eq=False)
class FurtherAttention:
    """The attention of the layer that predicts further tokens. :ivar down: the projection to the latent row alone."""

    backend: Backend
    attention: LatentAttention
    down: Array

    def forward(self, step: Any, x: Array) -> Array:
        return self.attention.project(self.backend, self.attention.attend(self.backend, step, x))

    def store(self, step: Any, x: Array) -> None:
        b, a = self.backend, self.attention
        row = a.row(b, step, b.linear(x, self.down))
        b.attention(step, (0, a.number), row, row, None, write_only(a.spec))


class DeepseekV3Model(StackModel):
    """See the module's docstring. One kind of pages: latent rows."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        keys = Keys(source, ARCHITECTURE)
        c = self._config = LatentConfig.read(keys, options)
        m = self._mixture = MixtureConfig.read(keys, c.layers)
        keys.refuse_others()
        self._backend, self._eps = backend, c.eps
        rotation = attrs.evolve(c.rope.rotation(interleaved=True), magnitude=c.magnitude)
        self._rotation = rotation
        self._ends = Ends.load(source, backend, c.width)
        blocks = [Block(source, backend, number) for number in range(c.layers + c.further)]
        mixed = {b.number: b.experts(m.experts, m.expert_ffn, c.width) for b in blocks if m.mixes(b.number)}
        experts = ResidentExperts(backend, mixed)
        self._layers = tuple(self._layer(block, experts) for block in blocks[: c.layers])
        if c.further:
            self.further = self._load_further(blocks[-1], experts)
        self.geometry = Geometry(ARCHITECTURE, c.layers, c.width, self._ends.vocab, c.context)

    def _layer(self, block: Block, experts: ExpertSource) -> Layer:
        c, m = self._config, self._mixture
        return Layer(
            attention_norm=block.vector("attn_norm.weight", c.width),
            attention=self._attention(block),
            ffn_norm=block.vector("ffn_norm.weight", c.width),
            ffn=self._mixed(block, experts) if m.mixes(block.number) else _gated(block, c.width, m.ffn),
            eps=c.eps,
        )

    def _load_further(self, block: Block, experts: ExpertSource) -> FurtherLayer:
        c, b, layer = self._config, self._backend, self._layer(block, experts)
        attention, norm = layer.attention, "nextn.shared_head_norm.weight"
        assert isinstance(attention, LatentAttention)
        predictor = PlainPredictor(
            entrance=Entrance.load(block, c.width, c.eps),
            attention_norm=layer.attention_norm,
            mixer=FurtherAttention(b, attention, block.matrix(c.width, attn_kv_a_mqa=c.rank + c.rotated)),
            ffn_norm=layer.ffn_norm,
            ffn=layer.ffn,
            norm=block.vector(norm, c.width) if block.has(norm) else self._ends.norm,
            output=output_of(block, self._ends.output),
            eps=c.eps,
        )
        embedding = embedding_of(block, self._ends.embedding)
        return FurtherLayer(self, b, predictor, lambda step: b.embed(step, embedding), c.width)

    def _attention(self, block: Block) -> LatentAttention:
        c = self._config
        queries, row = c.heads * (c.plain + c.rotated), c.rank + c.rotated
        if c.query_rank:
            down = block.matrix(c.width, attn_q_a=c.query_rank, attn_kv_a_mqa=row)
        else:
            down = block.matrix(c.width, attn_q=queries, attn_kv_a_mqa=row)
        return LatentAttention(
            config=c,
            down=down,
            query_norm=block.vector("attn_q_a_norm.weight", c.query_rank) if c.query_rank else None,
            query=block.matrix(c.query_rank, attn_q_b=queries) if c.query_rank else None,
            norm=block.vector("attn_kv_a_norm.weight", c.rank),
            keys=block.vector("attn_k_b.weight", c.heads, c.rank, c.plain),
            values=block.vector("attn_v_b.weight", c.heads, c.value_dim, c.rank),
            rotation=self._rotation,
            spec=AttentionSpec(c.heads, 1, row, c.rank, c.scale, latent=True),
            number=block.number,
            output=block.matrix(c.heads * c.value_dim, attn_output=c.width),
        )

    def _mixed(self, block: Block, experts: ExpertSource) -> FeedForward:
        c, m = self._config, self._mixture
        router = Router(
            weight=block.matrix(c.width, ffn_gate_inp=m.experts),
            top=m.top,
            scoring=m.scoring,
            normalise=m.normalise,
            scale=m.weights_scale,
            correction=block.optional("exp_probs_b.bias", m.experts),
            groups=m.groups,
            top_groups=m.top_groups,
        )
        shared = _gated(block, c.width, m.shared * m.expert_ffn, "_shexp") if m.shared else None
        return MixtureFeedForward(block.number, router, experts, ExpertSpec(), shared)

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        c = self._config
        layout = PageLayout.attention(
            layers=c.layers + c.further,
            kv_heads=1,
            head_dim=c.rank + c.rotated,
            kv_type=kv_type,
            page_tokens=page_tokens,
            latent=True,
        )
        return (layout,)

    def identity(self) -> Mapping[str, str | int | float]:
        facts = identity_of(ARCHITECTURE, self._config, self._mixture, rope=self._rotation)
        further = facts.pop("further")
        return facts | ({"mtp": further} if further else {})  # by the name that users know


def _gated(block: Block, width: int, ffn: int, suffix: str = "") -> GatedFeedForward:
    gate_up = block.matrix(width, **{f"ffn_gate{suffix}": ffn, f"ffn_up{suffix}": ffn})
    return GatedFeedForward(gate_up, block.matrix(ffn, **{f"ffn_down{suffix}": width}))


FAMILY = Family("deepseek_v3", (ARCHITECTURE,), DeepseekV3Model)
