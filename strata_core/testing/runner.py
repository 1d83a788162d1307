"""A model driven by hand: no scheduler, no sampling but greedy, every sequence in pages of its own."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import Backend, Batch, PageStore, Span
from strata_core.memory.arena import PortableArena
from strata_core.models.base import Model

Tokens = NDArray[np.int32]


@attrs.frozen(eq=False)
class Rows:
    """Tokens of one sequence at positions ``start ..``."""

    sequence: int
    start: int
    tokens: Tokens


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

    def step(self, parts: Sequence[Rows], outputs: Sequence[int]) -> NDArray[np.float32]:
        """Run one batch; logits of the rows ``outputs``, counted over all parts."""
        spans = []
        for part in parts:
            table = np.arange(part.sequence * self._pages, (part.sequence + 1) * self._pages, dtype=np.int32)
            spans.append(Span(part.start, len(part.tokens), tuple(table for _ in self.stores)))
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

    def close(self) -> None:
        """Free the pages."""
        for store in self.stores:
            store.close()
