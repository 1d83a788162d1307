"""Putting drafts into the rows of replies: from the text so far where it repeats itself, else with the model's own
layer for further tokens.

That layer is asked right before the step that computes what it guesses, so a draft never outlives the step, and a
request that ended has none. The K/V rows that guesses leave in the pages lie behind the sequence's end, where rows mean
nothing; the step overwrites them with those of the tokens that it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import numpy as np

from strata_core.compute.base import Batch, PageStore, Span
from strata_core.conversations.live import Live
from strata_core.engine.step import Rows
from strata_core.errors import OutOfMemory
from strata_core.models.base import DraftLayer

log = logging.getLogger("strata.engine")


@attrs.define(eq=False)
class _Chain:
    """Guesses for one reply: the last token so far, its hidden row, and how many tokens to guess."""

    part: Rows
    live: Live
    count: int
    hidden: np.ndarray
    tokens: list[int]

    @property
    def position(self) -> int:
        """Of the last token so far."""
        return len(self.live.tokens) + len(self.tokens) - 1


class Drafting:
    """Chooses and makes drafts. Engine thread only.

    :param layer: the model's own; None where there is none or it is not to be asked.
    :param stores: those of the model's layouts.
    :param max_context: tokens of a sequence, at most.
    """

    def __init__(self, layer: DraftLayer | None, stores: Sequence[PageStore], max_context: int):
        self._layer = layer
        self._stores = tuple(stores)
        self._max_context = max_context

    def add(self, parts: Sequence[Rows], share: int) -> None:
        """Append drafts to the rows of replies; those whose last token's state is to be computed again get none.

        :param share: most rows of each part.
        """
        chains = []
        for part in parts:
            task, live = part.slot.task, part.slot.live
            assert task is not None
            assert live is not None
            if len(part.tokens) != 1:
                continue
            room = min(task.limit - task.generated, self._max_context - len(live.tokens) - 1, share) - 1
            lookup, mtp = task.drafters["lookup"], task.drafters["mtp"]
            if lookup.most:
                part.draft("lookup", lookup.propose(np.concatenate([live.tokens.view(), part.tokens]), room))
            if not part.drafts and live.hidden is not None and min(mtp.most, room) > 0 and mtp.due():
                chains.append(_Chain(part, live, min(mtp.most, room), live.hidden, [int(part.tokens[0])]))
        if self._layer is not None and chains:
            self._guess(self._layer, [chain for chain in chains if self._prepare(chain)])

    def _prepare(self, chain: _Chain) -> bool:
        """Whether there are pages for the rows of guesses. Nothing else gives way to them."""
        try:
            chain.live.table.prepare(chain.position, chain.count)
        except OutOfMemory:
            chain.live.table.truncate(chain.position)
            return False
        return True

    def _guess(self, layer: DraftLayer, chains: list[_Chain]) -> None:
        going = chains
        try:
            while going:
                ids, hidden = layer.guess(_batch(going), self._stores, np.stack([chain.hidden for chain in going]))
                for chain, token, row in zip(going, ids.tolist(), hidden, strict=True):
                    chain.tokens.append(token)
                    chain.hidden = row
                going = [chain for chain in going if len(chain.tokens) <= chain.count]
        except Exception:
            # Whatever a backend throws: replies go on without guesses, and are tried again ever more rarely.
            log.exception("guessing ahead for %d replies failed", len(going))
            for chain in chains:
                chain.live.table.truncate(len(chain.live.tokens))
                assert chain.part.slot.task is not None
                chain.part.slot.task.drafters["mtp"].learn(0, 0)
            return
        for chain in chains:
            chain.part.draft("mtp", np.array(chain.tokens[1:], np.int32))


def _batch(chains: Sequence[_Chain]) -> Batch:
    """The last token of each chain."""
    spans = tuple(Span(chain.position, 1, chain.live.table.arrays(chain.position + 1)) for chain in chains)
    tokens = np.array([chain.tokens[-1] for chain in chains], np.int32)
    return Batch(tokens, spans, np.arange(len(chains), dtype=np.int32))
