"""Which stored copies a client has rewritten. Pure.

A client that compacts a long conversation sends the same beginning (system prompt and first user message) and then
something else. The old copy will not be asked for again, but it would stay until the budget finds it, because it is no
beginning of the new one. It is told from a mere sibling, another conversation with the same opening, by ownership: only
copies of the same conversation count, and only if they leave no doubt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from strata_core.conversations.tokens import common_prefix
from strata_core.store.base import Entry


@attrs.frozen
class Compaction:
    """Copies to discard; or, where ``doubt`` is not empty, why none are."""

    rewritten: tuple[Entry, ...] = ()
    doubt: str = ""


def header_end(turns: Sequence[int]) -> int | None:
    """Where the first user turn ends: at the third turn opener (after system and user), or the second where there are
    only two; None where turns are not known."""
    if len(turns) >= 3:
        return turns[2]
    return turns[1] if len(turns) == 2 else None


def rewritten_by(newer: Entry, stored: Sequence[Entry], divergence: int) -> Compaction:
    """Copies of the same conversation that ``newer`` has left behind by rewriting its history.

    A copy counts if it shares the header with ``newer`` and leaves it before position ``divergence``. Of several, those
    that share most are looked at; unless each is a beginning of the next they are different histories, and none goes.
    """
    header = header_end(newer.turns)
    if header is None:
        return Compaction()
    candidates = []
    for entry in stored:
        if entry.conversation != newer.conversation or entry.identity != newer.identity or entry.pinned or entry.root:
            continue
        shared = common_prefix(entry.tokens, newer.tokens)
        if header <= shared < min(len(entry.tokens), len(newer.tokens), divergence):
            candidates.append((shared, entry))
    if not candidates:
        return Compaction()
    most = max(shared for shared, _ in candidates)
    chain = sorted((entry for shared, entry in candidates if shared == most), key=lambda entry: len(entry.tokens))
    for shorter, longer in itertools.pairwise(chain):
        if not np.array_equal(shorter.tokens, longer.tokens[: len(shorter.tokens)]):
            return Compaction(doubt=f"{len(chain)} copies leave at position {most} with different histories")
    return Compaction(tuple(chain))
