"""One step: rows of several slots through the model, and what to do when that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from strata_core.compute.base import Batch, PageStore, Span
from strata_core.engine.slots import Slot
from strata_core.errors import BackendError, OutOfMemory, StrataError
from strata_core.models.base import Model

log = logging.getLogger("strata.engine")


@attrs.define(eq=False)
class Rows:
    """A slot's part of a step: the ids to compute, and of how many of the last ones logits are wanted.

    :ivar drafts: how many of the last ids are guesses, :ivar kind: of which kind. Then whoever reads the logits appends
        those that were right.
    :ivar logits: float32 ``(wanted, vocab)`` after the step, where any are; :ivar error: why there are none.
    :ivar hidden: float32 hidden rows of all ids, of a model that can guess with them.
    """

    slot: Slot
    tokens: np.ndarray
    wanted: int
    drafts: int = 0
    kind: str = ""
    logits: np.ndarray | None = None
    error: StrataError | None = None
    hidden: np.ndarray | None = None

    def draft(self, kind: str, tokens: np.ndarray) -> None:
        """Append guesses; logits of each are wanted."""
        self.tokens = np.concatenate([self.tokens, tokens])
        self.wanted, self.drafts, self.kind = self.wanted + len(tokens), len(tokens), kind

    def drop_drafts(self) -> None:
        """Take the guesses and their pages away again; the next ones are put off, as after wrong ones."""
        known = len(self.tokens) - self.drafts
        self.tokens, self.wanted, self.drafts = self.tokens[:known], self.wanted - self.drafts, 0
        live, task = self.slot.live, self.slot.task
        assert live is not None
        assert task is not None
        live.table.truncate(len(live.tokens) + known)
        task.drafters[self.kind].learn(0, 0)


class Stepper:
    """Runs steps.

    :param shed: frees memory by letting a parked conversation go; False when there is none left to let go.
    """

    def __init__(self, model: Model, stores: Sequence[PageStore], shed: Callable[[], bool]):
        self._model = model
        self._stores = tuple(stores)
        self._shed = shed
        self.failures = 0

    def run(self, parts: Sequence[Rows]) -> None:
        """Compute all parts together, append their ids (unless there are drafts among them) to the slots' tokens, and
        set ``logits``.

        A part that fails gets ``error`` instead and its slot's tokens stay as they were. When the whole step fails,
        every part is tried alone, and then without its drafts, so that neither a request which cannot be computed nor
        a guess takes others with it.
        """
        ready = [part for part in parts if self._prepare(part, parts)]
        if not ready:
            return
        error = self._forward(ready)
        if error is None:
            return
        for part in ready:
            part.error = self._forward([part]) if len(ready) > 1 else error
            if part.error is not None and part.drafts:
                part.drop_drafts()
                part.error = self._forward([part])

    def _prepare(self, part: Rows, parts: Sequence[Rows]) -> bool:
        live = part.slot.live
        assert live is not None
        while True:
            try:
                live.table.prepare(len(live.tokens), len(part.tokens))
                if live.states is not None:
                    live.states.begin()
                return True
            except OutOfMemory as error:
                # Guesses take no room from anything else, this part's own first.
                guessing = next((one for one in (part, *parts) if one.drafts), None)
                if guessing is not None:
                    guessing.drop_drafts()
                elif not self._shed():
                    part.error = error
                    return False

    def _forward(self, parts: Sequence[Rows]) -> StrataError | None:
        try:
            logits, hidden = self._compute(_batch(parts, self._model.lookback), parts)
            if not np.isfinite(logits.max(axis=-1)).all():
                raise BackendError("the model's output is not a number")
        except Exception as error:
            # Whatever a backend throws, the engine and other requests go on.
            self.failures += 1
            log.exception("a step of %d rows failed", sum(len(p.tokens) for p in parts))
            return error if isinstance(error, StrataError) else BackendError(f"{type(error).__name__}: {error}")
        row = first = 0
        for part in parts:
            assert part.slot.live is not None
            part.hidden = None if hidden is None else hidden[first : first + len(part.tokens)]
            if not part.drafts:
                part.slot.live.extend(part.tokens, part.hidden)
            part.logits = logits[row : row + part.wanted] if part.wanted else None
            row, first = row + part.wanted, first + len(part.tokens)
        return None

    def _compute(self, batch: Batch, parts: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits and, of a model that guesses with them, hidden rows."""
        layer = self._model.further
        if layer is None:
            return self._model.forward(batch, self._stores), None
        before = np.zeros((len(parts), layer.width), np.float32)
        for row, part in zip(before, parts, strict=True):
            if part.slot.live is not None and part.slot.live.hidden is not None:
                row[:] = part.slot.live.hidden
        return layer.forward(batch, self._stores, before)


def _batch(parts: Sequence[Rows], lookback: int) -> Batch:
    spans = []
    outputs: list[int] = []
    row = 0
    for part in parts:
        live = part.slot.live
        assert live is not None
        start, rows = len(live.tokens), len(part.tokens)
        state = None if live.states is None else live.states.begin()
        before = live.tokens.view()[start - min(start, lookback) :].copy()
        spans.append(Span(start, rows, live.table.arrays(start + rows), state, before))
        row += rows
        outputs += range(row - part.wanted, row)
    tokens = np.concatenate([part.tokens for part in parts]).astype(np.int32)
    return Batch(tokens, tuple(spans), np.array(outputs, np.int32))
