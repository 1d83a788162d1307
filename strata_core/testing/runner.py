"""A model driven by hand: no scheduler, no sampling but greedy, every sequence in pages of its own.

Of a model with recurrent state, the state after every step is kept, so that a sequence can go on wherever one ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import NO_STATE, Backend, Batch, PageStore, Span
from strata_core.memory.arena import PortableArena
from strata_core.models.base import Model

Tokens = NDArray[np.int32]

#: Pages of a chunk of the store of states.
_STATES = 64


@attrs.frozen(eq=False)
class Rows:
    """Tokens of one sequence at positions ``start ..``."""

    sequence: int
    start: int
    tokens: Tokens


@attrs.frozen(eq=False)
class Image:
    """A sequence as it is stored: its ids, and the bytes of its pages, one block per store, the state last."""

    tokens: Tokens
    blocks: tuple[NDArray[np.uint8], ...]


class ModelRunner:
    """Room for ``sequences`` sequences of ``length`` positions each.

    :param kv_type: None for the backend's default.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        sequences: int = 1,
        length: int = 1024,
        kv_type: str | None = None,
        page_tokens: int = 32,
    ):
        self.model = model
        self.stores: list[PageStore] = []
        layouts = model.layouts(kv_type or backend.kv_types[0], page_tokens)
        self._pages = layouts[0].pages_for(length)
        for layout in layouts:
            store = backend.page_store(layout, self._pages, PortableArena("off"))
            for chunk in range(sequences):
                store.add_chunk(chunk)
            self.stores.append(store)
        self._layouts = len(layouts)
        self._tokens: dict[int, Tokens] = {}
        self._states: dict[tuple[int, int], int] = {}
        self._taken = 0
        states = model.state_layout()
        if states is not None:
            self.stores.append(backend.page_store(states, _STATES, PortableArena("off")))

    def step(self, parts: Sequence[Rows], outputs: Sequence[int]) -> NDArray[np.float32]:
        """Run one batch; logits of the rows ``outputs``, counted over all parts."""
        spans = []
        for part in parts:
            table = np.arange(part.sequence * self._pages, (part.sequence + 1) * self._pages, dtype=np.int32)
            before = self._tokens.get(part.sequence, part.tokens[:0])[: part.start]
            if len(before) < part.start:
                raise ValueError(f"sequence {part.sequence} has only {len(before)} positions, not {part.start}")
            stop = part.start + len(part.tokens)
            self._tokens[part.sequence] = np.concatenate([before, part.tokens])
            spans.append(
                Span(
                    part.start,
                    len(part.tokens),
                    tuple(table for _ in range(self._layouts)),
                    self._state(part.sequence, part.start, stop),
                    before[len(before) - min(len(before), self.model.lookback) :],
                )
            )
        tokens = np.concatenate([part.tokens for part in parts])
        return self.model.forward(Batch(tokens, tuple(spans), np.array(outputs, np.int32)), self.stores)

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """Logits ``(len(tokens), vocab)`` of a prompt read at once."""
        return self.step([Rows(0, 0, tokens)], range(len(tokens)))

    def last_logits(self, tokens: Tokens, chunk: int) -> NDArray[np.float32]:
        """Logits ``(vocab,)`` of the last row of a prompt read in chunks."""
        logits = np.empty((0, 0), np.float32)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = self.step([Rows(0, start, part)], [len(part) - 1])
        last: NDArray[np.float32] = logits[0]
        return last

    def greedy(self, prompt: Tokens, count: int) -> Tokens:
        """The ``count`` likeliest next tokens, one after the other."""
        logits, found = self.last_logits(prompt, 512), []
        for position in range(len(prompt), len(prompt) + count):
            found.append(int(logits.argmax()))
            logits = self.step([Rows(0, position, np.array(found[-1:], np.int32))], [0])[0]
        return np.array(found, np.int32)

    def image(self, sequence: int, position: int) -> Image:
        """What has to be stored of a sequence to go on at ``position``; of a model with state, where a step ended."""
        blocks = []
        for store in self.stores[: self._layouts]:
            first = sequence * self._pages
            blocks.append(_download(store, range(first, first + store.layout.pages_for(position))))
        if len(self.stores) > self._layouts:
            blocks.append(_download(self.stores[-1], [self._states[sequence, position]]))
        return Image(self._tokens[sequence][:position], tuple(blocks))

    def resume(self, sequence: int, image: Image) -> None:
        """Put a stored sequence in place of one of the runner's."""
        self._tokens[sequence] = image.tokens
        for store, block in zip(self.stores[: self._layouts], image.blocks, strict=False):
            store.upload(block, range(sequence * self._pages, sequence * self._pages + len(block))).wait()
        if len(self.stores) > self._layouts:
            page = self._state_page(sequence, len(image.tokens))
            self.stores[-1].upload(image.blocks[-1], [page]).wait()

    def _state(self, sequence: int, start: int, stop: int) -> tuple[int, int] | None:
        if len(self.stores) == self._layouts:
            return None
        before = NO_STATE if start == 0 else self._states[sequence, start]
        return before, self._state_page(sequence, stop)

    def _state_page(self, sequence: int, position: int) -> int:
        page = self._states[sequence, position] = self._taken
        if page % _STATES == 0:
            self.stores[-1].add_chunk(page // _STATES)
        self._taken += 1
        return page

    def close(self) -> None:
        """Free the pages."""
        for store in self.stores:
            store.close()


def _download(store: PageStore, pages: Sequence[int]) -> NDArray[np.uint8]:
    block = np.empty((len(pages), store.layout.nbytes), np.uint8)
    store.download(pages, block).wait()
    return block
