"""The rows of one step: which sequences they belong to, at which positions, and where these keep what they computed."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

#: In place of the page of a state: there is none yet, it is all zeros.
NO_STATE = -1


@attrs.frozen(eq=False)
class Span:
    """Consecutive rows of a batch that belong to one sequence.

    :ivar start: position of the first row (0 = first token of the sequence).
    :ivar rows: number of rows, at least 1; they are at positions ``start .. start + rows - 1``.
    :ivar tables: one int32 page table per page layout of the model, each covering positions ``0 .. start + rows - 1``:
        the K/V of position ``p`` live in page ``tables[layout][p // page_tokens]``, row ``p % page_tokens``.
    :ivar state: for models with recurrent state: (page of the state store that holds the state before the first row,
        page to write the state after the last row to). The first is :data:`NO_STATE` for a span that starts at 0: its
        state is all zeros. The two differ, and no other span writes to the second; several may read the first.
    :ivar before: int32 ids of the tokens at the positions before ``start``, as many as the model's ``lookback`` asks
        for and there are.
    """

    start: int
    rows: int
    tables: tuple[np.ndarray, ...]
    state: tuple[int, int] | None = None
    before: np.ndarray = attrs.field(factory=lambda: np.empty(0, np.int32))


@attrs.frozen(slots=False, eq=False)
class Batch:
    """The rows of one step.

    :ivar tokens: int32 ``(rows,)`` token ids, span after span.
    :ivar spans: the sequences, in row order; no sequence appears twice. Two spans may share pages only below both
        their starts (those are only read).
    :ivar outputs: int32 row indices, ascending, whose logits are wanted.
    """

    tokens: np.ndarray
    spans: tuple[Span, ...]
    outputs: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 ``(rows,)``: the position of every row in its sequence."""
        return np.concatenate([np.arange(s.start, s.start + s.rows, dtype=np.int32) for s in self.spans])

    @cached_property
    def offsets(self) -> np.ndarray:
        """int32 ``(spans + 1,)``: first row of every span, and the number of rows."""
        return np.concatenate([[0], np.cumsum([s.rows for s in self.spans])]).astype(np.int32)
