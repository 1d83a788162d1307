"""Layers that predict further tokens, for drafts (multi-token prediction: Gloeckle et al. 2024, DeepSeek-AI 2024).

A model has such layers behind its others: ``block_count`` counts them, ``nextn_predict_layers`` says how many they are.
The first is used, again and again for tokens further ahead. Its tensors are those of a layer that attends and, below
``nextn.``, what makes its input and leads to the output: ``enorm`` and ``hnorm`` norm the token's embedding and the
hidden row, ``eh_proj`` takes both side by side, the embedding first.

Hidden rows are what the output projection takes, behind the model's last norm and behind the layer's own: so do vLLM,
SGLang and llama.cpp with Qwen3-Next and Qwen3.5, and SGLang with DeepSeek-V3. With another choice the guesses would be
worse; replies would be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np

from strata_core.compute.base import Array, AttentionSpec, Backend, Batch, PageStore
from strata_core.models.base import DraftLayer
from strata_core.models.layered import LayeredModel
from strata_core.models.loading import Block
from strata_core.models.stack import FeedForward
from strata_core.weights.source import fingerprint

if TYPE_CHECKING:
    from strata_core.models.keys import Keys
    from strata_core.weights.tensor import StoredTensor


@attrs.frozen
class Depth:
    """How many layers a file has.

    :ivar layers: those of the model itself; :ivar further: 1 if a layer behind them is used to guess, else 0.
    """

    layers: int
    further: int

    @classmethod
    def read(cls, keys: Keys, wanted: bool) -> Depth:
        """Tensors of layers that are not used count as heard of: nothing else depends on them.

        :param wanted: whether the layer that predicts further tokens is used.
        :raises ModelFileError: ``nextn_predict_layers`` leaves no layer to the model.
        """
        counted, predict = keys.size("block_count"), keys.count("nextn_predict_layers", 0)
        if predict >= counted:
            raise keys.wrong("nextn_predict_layers", f"there are only {counted} layers")
        layers, tensors = counted - predict, keys.source.tensors
        first = f"blk.{layers}.nextn."
        further = int(wanted and predict > 0 and any(name.startswith(first) for name in tensors))
        unused = tuple(f"blk.{number}." for number in range(layers + further, counted))
        for name in tensors:
            if unused and name.startswith(unused):
                keys.source.get(name)
        return cls(layers, further)


class Predictor(Protocol):
    """A family's layer, with what comes before and behind it; ``x`` is its residual."""

    def enter(self, b: Backend, embedded: Array, hidden: Array) -> Array:
        """The residual that the layer begins with, of embeddings and hidden rows."""

    def store(self, b: Backend, step: Any, x: Array) -> None:
        """Write the rows' K/V."""

    def apply(self, b: Backend, step: Any, x: Array) -> Array:
        """Run the layer, which also writes K/V: hidden rows."""

    def logits(self, b: Backend, hidden: Array) -> Array:
        """``(rows, vocab)`` of hidden rows."""


class FurtherLayer(DraftLayer):
    """What :attr:`Model.further` of the built-in families is.

    :param embed: embeds the tokens of a step.
    :param width: of a hidden row.
    """

    def __init__(
        self, model: LayeredModel, backend: Backend, predictor: Predictor, embed: Callable[[Any], Array], width: int
    ):
        self._model, self._backend, self._predictor, self._embed = model, backend, predictor, embed
        self.width = width

    def forward(
        self, batch: Batch, stores: Sequence[PageStore], before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        b, model = self._backend, self._model
        step = b.begin(batch, stores)
        rows = model.hidden(step, batch, every=True)
        hidden = b.to_host(rows)
        logits = model.no_logits()
        if len(batch.outputs):
            logits = b.to_host(model.logits(b.select_outputs(step, rows)))
        # A row takes the hidden row of the one before it. No operation moves rows, and the caller wants them here.
        heard = np.empty_like(hidden)
        heard[1:] = hidden[:-1]
        heard[batch.offsets[:-1]] = before
        x = self._predictor.enter(b, self._embed(step), b.from_host(heard))
        self._predictor.store(b, step, x)
        return logits, hidden

    def guess(
        self, batch: Batch, stores: Sequence[PageStore], hidden: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        b = self._backend
        step = b.begin(batch, stores)
        x = self._predictor.enter(b, self._embed(step), b.from_host(hidden))
        rows = self._predictor.apply(b, step, x)
        logits = b.to_host(self._predictor.logits(b, rows))
        return logits.argmax(axis=-1).astype(np.int32), b.to_host(rows)


@attrs.frozen(eq=False)
class Entrance:
    """Makes a layer's input of embeddings and hidden rows.

    :ivar hidden_norm: as long as a hidden row, which it norms as a whole. It is not the norm of streams that the other
        norms of Qwen4-Exp are; vLLM and SGLang have it so.
    :ivar streams: of a hidden row; each is joined with the embedding.
    """

    embedding_norm: Array
    hidden_norm: Array
    project: Array
    width: int
    streams: int
    eps: float

    @classmethod
    def load(cls, block: Block, width: int, eps: float, streams: int = 1) -> Entrance:
        """:raises ModelFileError: a tensor is missing or of another shape."""
        return cls(
            embedding_norm=block.vector("nextn.enorm.weight", width),
            hidden_norm=block.vector("nextn.hnorm.weight", streams * width),
            project=block.matrix(2 * width, **{"nextn.eh_proj": width}),
            width=width,
            streams=streams,
            eps=eps,
        )

    def enter(self, b: Backend, embedded: Array, hidden: Array) -> Array:
        """``(rows, width)`` and ``(rows, streams * width)`` to the latter."""
        embedded = b.rms_norm(embedded, self.embedding_norm, self.eps)
        streams = b.split(b.rms_norm(hidden, self.hidden_norm, self.eps), [self.width] * self.streams)
        return b.join([b.linear(b.join([embedded, stream]), self.project) for stream in streams])


class Mixer(Protocol):
    """What attends in a :class:`PlainPredictor`; normed rows ``(rows, width)`` are its input."""

    def forward(self, step: Any, x: Array) -> Array:
        """To the same shape; writes the rows' K/V."""

    def store(self, step: Any, x: Array) -> None:
        """Only write them."""


@attrs.frozen(eq=False)
class PlainPredictor:
    """A pre-norm layer: attention, then a feed-forward, each of normed rows and added to them; ``norm`` comes last."""

    entrance: Entrance
    attention_norm: Array
    mixer: Mixer
    ffn_norm: Array
    ffn: FeedForward
    norm: Array
    output: Array
    eps: float

    def enter(self, b: Backend, embedded: Array, hidden: Array) -> Array:
        return self.entrance.enter(b, embedded, hidden)

    def store(self, b: Backend, step: Any, x: Array) -> None:
        self.mixer.store(step, b.rms_norm(x, self.attention_norm, self.eps))

    def apply(self, b: Backend, step: Any, x: Array) -> Array:
        x = b.add(x, self.mixer.forward(step, b.rms_norm(x, self.attention_norm, self.eps)))
        x = b.add(x, self.ffn.apply(b, b.rms_norm(x, self.ffn_norm, self.eps)))
        return b.rms_norm(x, self.norm, self.eps)

    def logits(self, b: Backend, hidden: Array) -> Array:
        return b.linear(hidden, self.output)


def write_only(spec: AttentionSpec) -> AttentionSpec:
    """The least attention that writes keys and values: no operation writes them and does not attend, so keys take the
    place of queries and a row sees itself only."""
    return attrs.evolve(spec, heads=spec.kv_heads, window=1)


def embedding_of(block: Block, shared: Array) -> Array:
    """What embeds tokens for the layer: a table of its own, or the model's, which is ``shared``.

    :raises ModelFileError: it is of another shape.
    """
    return _own_or_shared(block, "embed_tokens", "token_embd.weight", shared, block.backend.table)


def output_of(block: Block, shared: Array) -> Array:
    """The layer's output projection; see :func:`embedding_of`."""
    of_model = "output.weight" if "output.weight" in block.source.tensors else "token_embd.weight"
    return _own_or_shared(block, "shared_head_head", of_model, shared, block.backend.matrix)


def _own_or_shared(
    block: Block, name: str, of_model: str, shared: Array, take: Callable[[StoredTensor], Array]
) -> Array:
    """A copy of the model's table, which files of DeepSeek-V3 have, is not taken in again."""
    if not block.has(f"nextn.{name}.weight"):
        return shared
    theirs = block.source.require(of_model)
    own = block.tensor(f"nextn.{name}.weight", *theirs.shape)
    return shared if fingerprint({name: own}) == fingerprint({name: theirs}) else take(own)
