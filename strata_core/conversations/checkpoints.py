"""Where states of a sequence are kept, so that it can be resumed there. Pure functions.

Models with recurrent state can be resumed only where a state was kept. That is: at the root (where a long system prompt
ends, and others branch off), at the last turn's opener (where a client that words the reply differently comes back to),
every so many tokens of a long prompt, and at the end. All but the end are page boundaries, so that what precedes them
is complete pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class CheckpointRules:
    """``--prompt-cache``, ``--prompt-cache-every`` and ``--prompt-cache-root``.

    :ivar most: states kept per conversation beside the one at its end.
    :ivar every: tokens from one state to the next while a prompt is read; 0 for none.
    :ivar root: least position of the root.
    """

    most: int = 6
    every: int = 16384
    root: int = 2048


def root_position(turns: Sequence[int], page_tokens: int, least: int, prefix: int = 0) -> int | None:
    """Where what conversations share ends: the last page boundary within ``prefix``, where a client has said it, else
    the first turn boundary at or behind ``least``: the page boundary at or before a turn's opener."""
    if prefix >= page_tokens:
        return prefix // page_tokens * page_tokens
    boundaries = (turn // page_tokens * page_tokens for turn in turns)
    return next((boundary for boundary in boundaries if boundary and boundary >= least), None)


def checkpoints(
    turns: Sequence[int], start: int, end: int, page_tokens: int, rules: CheckpointRules, prefix: int = 0
) -> tuple[int, ...]:
    """Ascending positions at which reading a prompt from ``start`` to ``end`` stops for its state to be kept.

    :param turns: positions of the tokens that open a turn, ascending. :param prefix: see :func:`root_position`.
    """
    if not rules.most:
        return ()
    wanted = set()
    if turns:
        wanted.add(turns[-1] // page_tokens * page_tokens)
    root = root_position(turns, page_tokens, rules.root, prefix)
    if root is not None:
        wanted.add(root)
    if rules.every:
        wanted.update(p // page_tokens * page_tokens for p in range(start + rules.every, end, rules.every))
    return tuple(sorted(position for position in wanted if start < position < end))


def worth_restoring(states: Sequence[int], most: int, root: int | None) -> tuple[int, ...]:
    """Which of the states at ascending positions come back into memory that has room for ``most`` beside the last: the
    root's and, of the others, the deepest."""
    first = [position for position in states[:-1] if position == root][:most]
    others = [position for position in states[:-1] if position not in first]
    room = most - len(first)
    return (*first, *others[max(0, len(others) - room) :], *states[-1:])
