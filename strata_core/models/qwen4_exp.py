"""The ``qwen4_exp`` family (Qwen3.8-Flash-Next): gated delta nets, every fourth layer sparse attention with an indexer.

The residual has several streams that gated hyper-connections mix; every layer has experts, one of them shared; chosen
layers add embeddings of n-grams, whose table is read by row from the model file. Value heads are tiled and the delta
nets' output gate is a sigmoid. Only text is read. The layer that predicts further tokens takes and gives the residual
of all streams; it has no n-grams, and its last hyper-connection is ``nextn.hc_head_*``.

Names beyond those of Qwen3.5's files: ``hc_attn_*`` and ``hc_ffn_*`` of each layer and ``output_hc_*``: ``norm``,
``down``, ``up`` and, within layers, ``inject``; ``indexer.{q_proj,k_proj,q_norm,k_norm}``; ``ple_{key,value,conv1d}``
and ``ple_norm_{key,query,conv}``; ``per_layer_token_embd``. There are no ``attn_norm``, ``post_attention_norm`` and
``output_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import Array, Backend, Batch
from strata_core.models.base import Family, Geometry, ModelOptions
from strata_core.models.hybrid.delta_net import DeltaNet
from strata_core.models.hybrid.feed_forward import MixtureSizes, load_mixtures
from strata_core.models.hybrid.gated_attention import GatedAttention, IndexSizes
from strata_core.models.hybrid.hyper import StreamMixer
from strata_core.models.hybrid.model import STATES
from strata_core.models.hybrid.ngrams import NGramEmbedding, NGramHash
from strata_core.models.hybrid.sizes import HybridSizes
from strata_core.models.hybrid.vocabulary import load_vocabulary
from strata_core.models.keys import Keys
from strata_core.models.layered import LayeredModel
from strata_core.models.loading import Block
from strata_core.models.mtp import Entrance, FurtherLayer, embedding_of, output_of
from strata_core.models.stack import MixtureFeedForward
from strata_core.pool.layout import PageLayout
from strata_core.weights.rows import RowTable, open_rows

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource

ARCHITECTURE = "qwen4exp"
TABLE = "per_layer_token_embd.weight"


@attrs.frozen
class NGramSizes:
    """Which layers have embeddings of n-grams, and how these are looked up.

    :ivar layers: numbers of the layers, from 0; :ivar hashes: one for each of them.
    """

    layers: tuple[int, ...]
    hashes: tuple[NGramHash, ...]
    kernel: int


@attrs.frozen
class Qwen4Config:
    """:ivar streams: of the residual; :ivar rank: width of the hyper-connections' narrow layer."""

    sizes: HybridSizes
    index: IndexSizes
    mixture: MixtureSizes
    streams: int
    rank: int
    ngrams: NGramSizes | None

    @classmethod
    def read(cls, source: WeightSource, options: ModelOptions) -> Qwen4Config:
        """
        :raises ModelFileError: a key is missing or impossible.
        :raises UnsupportedModel: a key asks for what this family does not do.
        """
        keys = Keys(source, ARCHITECTURE)
        sizes = HybridSizes.read(keys, options)
        config = cls(
            sizes=sizes,
            index=_read_index(keys, sizes),
            mixture=MixtureSizes.read(keys),
            streams=keys.size("hyper_connection.count"),
            rank=keys.size("hyper_connection.low_rank"),
            ngrams=_read_ngrams(source, keys, sizes) if "ple.layers" in keys else None,
        )
        # The first says which tokens stand for pictures, which are not read.
        keys.refuse_others("ple.image_token_id", "feed_forward_length")
        return config

    @property
    def ngram_state(self) -> int:
        """Elements of the state of an n-gram convolution."""
        assert self.ngrams is not None
        order = len(self.ngrams.hashes[0].multipliers)
        return (self.ngrams.kernel - 1) * order * self.streams * self.sizes.width


def _read_index(keys: Keys, sizes: HybridSizes) -> IndexSizes:
    block, tokens = keys.size("attention.indexer.block_size"), keys.size("attention.indexer.top_k")
    if tokens % block:
        raise keys.wrong("attention.indexer.top_k", f"it is not a multiple of the block of {block} positions")
    # Positions that are in no complete block are attended in any case: less than one block of them.
    if keys.count("attention.indexer.local_blocks", 0) > 1:
        raise keys.unsupported("attention.indexer.local_blocks")
    if "attention.compress_ratios" in keys:
        ratios = np.asarray(keys.source.metadata[keys.key("attention.compress_ratios")]).tolist()
        expected = [block if sizes.attends(number) else 0 for number in range(sizes.decoder.layers)]
        # Of layers that predict further tokens some converters say that they attend all. They are trained like others.
        if ratios[: len(expected)] != expected or not {0, block}.issuperset(ratios):
            raise keys.unsupported("attention.compress_ratios")
    width = keys.size("attention.indexer.key_length")
    if sizes.decoder.rope.rotated > width:
        raise keys.wrong("attention.indexer.key_length", f"{sizes.decoder.rope.rotated} elements are rotated")
    return IndexSizes(keys.size("attention.indexer.head_count"), width, block, tokens // block)


def _read_ngrams(source: WeightSource, keys: Keys, sizes: HybridSizes) -> NGramSizes:
    def numbers(name: str, count: int) -> NDArray[np.int64]:
        values = np.asarray(source.require_key(keys.key(name), np.ndarray), np.int64)
        if values.size != count:
            raise keys.wrong(name, f"it should hold {count} numbers")
        return values

    order, heads = keys.size("ple.ngram_size"), keys.size("ple.heads_per_ngram")
    if order < 2:
        raise keys.wrong("ple.ngram_size", "the smallest n-gram has two tokens")
    layers = [n for n in range(sizes.decoder.layers) if f"blk.{n}.ple_key.weight" in source.tensors]
    numbers("ple.layers", len(layers))
    each = (len(layers), order - 1, heads)
    multipliers = numbers("ple.layer_multipliers", len(layers) * order).reshape(len(layers), order)
    vocab, offsets = (numbers(f"ple.head_{name}", math.prod(each)).reshape(each) for name in ("vocab_sizes", "offsets"))
    table = source.require(TABLE)
    if vocab.min() < 1 or offsets.min() < 0 or (vocab + offsets).max() > table.shape[0]:
        raise keys.wrong("ple.head_offsets", f"some heads look beyond the {table.shape[0]} rows of {TABLE}")
    width = keys.count("embedding_length_per_layer_input", 0)
    if width not in (0, table.shape[1], table.shape[1] * (order - 1) * heads):
        raise keys.wrong("embedding_length_per_layer_input", f"rows of {TABLE} have {table.shape[1]} elements")
    end = source.require_key(keys.key("ple.eos_token_id"), int)
    hashes = tuple(NGramHash(*parts, end) for parts in zip(multipliers, vocab, offsets, strict=True))
    return NGramSizes(tuple(layers), hashes, keys.size("ple.conv_kernel"))


@attrs.frozen(eq=False)
class Qwen4Layer:
    """A mixer of rows and a mixture of experts between hyper-connections; embeddings of n-grams before, or None."""

    ngrams: NGramEmbedding | None
    mixer_streams: StreamMixer
    mixer: DeltaNet | GatedAttention
    ffn_streams: StreamMixer
    ffn: MixtureFeedForward

    def mix(self, step: Any, x: Array) -> Array:
        """The first half, behind the n-grams; ``x`` is the residual ``(rows, streams * width)``."""
        mixed, weights = self.mixer_streams.mix(x)
        return self.mixer_streams.inject(x, self.mixer.forward(step, mixed), weights)

    def feed(self, b: Backend, x: Array) -> Array:
        """The second half."""
        mixed, weights = self.ffn_streams.mix(x)
        return self.ffn_streams.inject(x, self.ffn.apply(b, mixed), weights)


@attrs.frozen(eq=False)
class Qwen4Predictor:
    """The layer that predicts further tokens; hidden rows are its residual. :ivar last: mixes the output's input."""

    entrance: Entrance
    layer: Qwen4Layer
    last: StreamMixer
    output: Array

    def enter(self, b: Backend, embedded: Array, hidden: Array) -> Array:
        return self.entrance.enter(b, embedded, hidden)

    def store(self, b: Backend, step: Any, x: Array) -> None:
        assert isinstance(self.layer.mixer, GatedAttention)
        self.layer.mixer.store(step, self.layer.mixer_streams.mix(x)[0])

    def apply(self, b: Backend, step: Any, x: Array) -> Array:
        return self.layer.feed(b, self.layer.mix(step, x))

    def logits(self, b: Backend, hidden: Array) -> Array:
        return b.linear(self.last.mix(hidden)[0], self.output)


class Qwen4Model(LayeredModel):
    """See the module's docstring."""

    def __init__(self, source: WeightSource, backend: Backend, options: ModelOptions):
        c = self._config = Qwen4Config.read(source, options)
        sizes, self._backend = c.sizes, backend
        vocabulary = self._vocabulary = load_vocabulary(source, backend, sizes.width)
        self._rotation = sizes.decoder.rope.rotation(interleaved=False)
        self._table: RowTable | None = None
        if c.ngrams is not None:
            self.lookback = c.ngrams.hashes[0].lookback
            self._table = open_rows(source.require(TABLE), options.ple_io, options.ple_cache_bytes)
        try:
            self._load(source, c)
        except BaseException:
            self.close()
            raise
        self.geometry = Geometry(
            ARCHITECTURE, sizes.decoder.layers, sizes.width, vocabulary.size, sizes.decoder.context
        )

    def _load(self, source: WeightSource, c: Qwen4Config) -> None:
        layers: list[Qwen4Layer] = []
        state = 0
        mixtures = load_mixtures(source, self._backend, c.sizes.feed_forwards, c.sizes.width, c.mixture)
        for ffn in mixtures[: c.sizes.decoder.layers]:
            layers.append(self._load_layer(source, ffn, state))
            state += 0 if c.sizes.attends(ffn.number) else 2
        self._layers = tuple(layers)
        self._last = self._streams(source, "output_hc_", injects=False)
        if c.sizes.further:
            self.further = self._load_further(source, mixtures[-1])

    def _load_further(self, source: WeightSource, ffn: MixtureFeedForward) -> FurtherLayer:
        c, b, block = self._config, self._backend, Block(source, self._backend, ffn.number)
        prefix = f"blk.{ffn.number}."
        layer = Qwen4Layer(
            ngrams=None,
            mixer_streams=self._streams(source, prefix + "hc_attn_"),
            mixer=GatedAttention.load(source, b, c.sizes, ffn.number, self._rotation, c.index, stores=True),
            ffn_streams=self._streams(source, prefix + "hc_ffn_"),
            ffn=ffn,
        )
        predictor = Qwen4Predictor(
            Entrance.load(block, c.sizes.width, c.sizes.decoder.eps, c.streams),
            layer,
            self._streams(source, prefix + "nextn.hc_head_", injects=False),
            output_of(block, self._vocabulary.output),
        )
        embedding = embedding_of(block, self._vocabulary.embedding)
        return FurtherLayer(self, b, predictor, lambda step: b.embed(step, embedding), c.streams * c.sizes.width)

    def _streams(self, source: WeightSource, prefix: str, *, injects: bool = True) -> StreamMixer:
        c = self._config
        eps, width = c.sizes.decoder.eps, c.sizes.width
        return StreamMixer.load(
            source, self._backend, prefix, streams=c.streams, width=width, rank=c.rank, eps=eps, injects=injects
        )

    def _load_layer(self, source: WeightSource, ffn: MixtureFeedForward, state: int) -> Qwen4Layer:
        c, b, number, prefix = self._config, self._backend, ffn.number, f"blk.{ffn.number}."
        mixer: DeltaNet | GatedAttention
        if c.sizes.attends(number):
            mixer = GatedAttention.load(source, b, c.sizes, number, self._rotation, c.index)
        else:
            mixer = DeltaNet.load(source, b, c.sizes, number, (STATES, state), tiled=True, gate="sigmoid")
        return Qwen4Layer(
            ngrams=self._load_ngrams(source, number),
            mixer_streams=self._streams(source, prefix + "hc_attn_"),
            mixer=mixer,
            ffn_streams=self._streams(source, prefix + "hc_ffn_"),
            ffn=ffn,
        )

    def _load_ngrams(self, source: WeightSource, number: int) -> NGramEmbedding | None:
        c = self._config
        if c.ngrams is None or number not in c.ngrams.layers or self._table is None:
            return None
        place = c.ngrams.layers.index(number)
        return NGramEmbedding.load(
            source,
            self._backend,
            f"blk.{number}.",
            c.ngrams.hashes[place],
            self._table,
            streams=c.streams,
            width=c.sizes.width,
            kernel=c.ngrams.kernel,
            eps=c.sizes.decoder.eps,
            state=(STATES, len(c.sizes.states()) + place),
        )

    def layouts(self, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        return (self._config.sizes.layout(kv_type, page_tokens, index_dim=self._config.index.dim),)

    def state_layout(self) -> PageLayout:
        c, parts = self._config, self._config.sizes.states()
        if c.ngrams is not None:
            parts += [(f"ngrams.{number}", 1, c.ngram_state) for number in c.ngrams.layers]
        return PageLayout.state(parts)

    def identity(self) -> Mapping[str, str | int | float]:
        c = self._config
        facts = c.sizes.identity(ARCHITECTURE, self._rotation) | attrs.asdict(c.mixture)
        facts |= {f"index_{name}": value for name, value in attrs.asdict(c.index).items()}
        facts |= {"streams": c.streams, "rank": c.rank}
        if c.ngrams is not None:
            hashes = [(h.multipliers.tolist(), h.sizes.tolist(), h.offsets.tolist()) for h in c.ngrams.hashes]
            facts |= {"ngrams": repr((c.ngrams.layers, hashes, c.ngrams.hashes[0].end_of_text, c.ngrams.kernel))}
        return facts

    def counters(self) -> Mapping[str, int]:
        if self._table is None:
            return {}
        c = self._table.counters
        return {"ple_rows": c.rows, "ple_hits": c.hits, "ple_reads": c.reads, "ple_read_bytes": c.read_bytes}

    def close(self) -> None:
        if self._table is not None:
            self._table.close()

    def embed(self, step: Any) -> Array:
        return self._backend.embed(step, self._vocabulary.embedding)

    def hidden(self, step: Any, batch: Batch, every: bool) -> Array | None:
        b = self._backend
        x = b.repeat(self.embed(step), self._config.streams)
        for layer in self._layers:
            if layer.ngrams is not None:
                x = b.add(x, layer.ngrams.forward(step, batch, x))
            x = layer.mix(step, x)
            if layer is self._layers[-1] and not every:  # all K/V and states are written; now only wanted rows matter
                if not len(batch.outputs):
                    return None
                x = b.select_outputs(step, x)
            x = layer.feed(b, x)
        return x

    def logits(self, hidden: Array) -> Array:
        return self._backend.linear(self._last.mix(hidden)[0], self._vocabulary.output)


FAMILY = Family("qwen4_exp", (ARCHITECTURE,), Qwen4Model)
