"""How the rows of a step are shared out. Pure: what it decides depends on its arguments alone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Reader:
    """A slot that still reads its prompt.

    :ivar remaining: prompt tokens left, at least 1.
    :ivar starved: steps in a row in which it got none.
    """

    slot: int
    remaining: int
    starved: int


def share_rows(decoders: int, readers: Sequence[Reader], *, chunk: int, budget: int, age: int) -> dict[int, int]:
    """Prompt rows for each reading slot in this step; slots that get none are absent.

    Decode rows come first: one of every decoding slot, and its drafts. The first reader (they are in order of arrival)
    gets a chunk, cut to what the budget leaves, and never less than one row; with nobody decoding it gets a full chunk.
    Rows that then remain go to the readers behind it if they finish a prompt, so that short prompts do not wait for
    long ones.
    A reader that was starved for ``age`` steps gets a full chunk whatever the budget.
    """
    shares: dict[int, int] = {}
    left = budget - decoders
    for place, reader in enumerate(readers):
        full = min(chunk, reader.remaining)
        if reader.starved >= age:
            rows = full
        elif place == 0:
            rows = full if not decoders else max(1, min(full, left))
        elif reader.remaining <= min(left, chunk):
            rows = reader.remaining
        else:
            continue
        shares[reader.slot] = rows
        left -= rows
    return shares
