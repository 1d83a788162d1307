"""Which computed sequence a prompt resumes from. Pure functions over what is live and what is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from strata_core.conversations.ladder import Found
from strata_core.conversations.live import Live
from strata_core.conversations.resync import align
from strata_core.conversations.tokens import common_prefix
from strata_core.pool.states import resumable


@attrs.frozen
class MatchRules:
    """``--conversation-cache-similarity`` and ``--conversation-cache-n-min``."""

    similarity: float = 0.0
    n_min: int = 0

    def allow(self, shared: int, prompt: int) -> bool:
        return shared > 0 and shared >= self.n_min and shared / prompt > self.similarity


@attrs.frozen(eq=False)
class Candidate:
    """A sequence to resume from.

    :ivar shared: leading tokens taken from it.
    :ivar prompt: the ids to go on with, which differ from the request's only after a text match: then the first
        ``shared`` are the stored ones, and what follows is spelled the same as in the request.
    :ivar rung: ``end`` (all of it), ``page`` (a part), ``state`` (a part up to a state that was kept) or ``text``.
    :ivar at: first position where the sequence and the prompt differ, None where one merely ends.
    """

    source: str
    shared: int
    prompt: np.ndarray
    rung: str
    at: int | None
    live: Live | None = None
    found: Found | None = None


@attrs.frozen(eq=False)
class LiveMatch:
    """A live conversation and how many tokens of the prompt it offers."""

    live: Live
    shared: int
    busy: bool


def best_live(lives: Sequence[tuple[Live, bool]], identity: bytes, prompt: np.ndarray) -> LiveMatch | None:
    """The live conversation that shares most with the prompt; ties to the one used last.

    :param lives: conversations and whether their slot is busy; a busy one offers complete pages only, since it is
        still writing the last.
    """
    best: LiveMatch | None = None
    for live, busy in lives:
        if not live.keep or live.identity.digest != identity:
            continue
        shared = common_prefix(live.tokens.view(), prompt)
        if busy:
            shared -= shared % live.page_tokens
        if live.positions is not None:  # the last token of a prompt is always read
            shared = resumable(live.positions, min(shared, len(prompt) - 1))
        if shared and (best is None or (shared, live.used) > (best.shared, best.live.used)):
            best = LiveMatch(live, shared, busy)
    return best


def choose(
    live: LiveMatch | None,
    found: Found | None,
    prompt: np.ndarray,
    rules: MatchRules,
    spell: Callable[[int], bytes | None],
    max_context: int,
) -> Candidate | None:
    """The candidate to resume from: the live one unless a stored one shares strictly more.

    The last prompt token is always read: it gives the first logits.
    """
    if found is not None and (live is None or found.shared > live.shared):
        entry = found.entry
        candidate = _candidate(found.level.name, entry.tokens, entry.states, found.shared, prompt, spell, max_context)
        candidate = attrs.evolve(candidate, found=found)
    elif live is not None:
        # A conversation whose slot is busy offers complete pages only, so its text is not followed further.
        follow = (lambda _: None) if live.busy else spell
        one = live.live
        candidate = _candidate("live", one.tokens.view(), one.positions, live.shared, prompt, follow, max_context)
        candidate = attrs.evolve(candidate, live=one)
    else:
        return None
    return candidate if rules.allow(candidate.shared, len(candidate.prompt)) else None


def _candidate(
    source: str,
    tokens: np.ndarray,
    states: Sequence[int] | None,
    shared: int,
    prompt: np.ndarray,
    spell: Callable[[int], bytes | None],
    max_context: int,
) -> Candidate:
    """:param shared: tokens that can be taken; with ``states``, those up to one of them."""
    common = shared if states is None else common_prefix(tokens, prompt)
    differs = common < min(len(tokens), len(prompt)) and tokens[common] != prompt[common]
    at = common if differs else None
    if at is not None:
        stored, same = align(tokens, prompt, common, spell)
        respelled = np.concatenate([tokens[:stored], prompt[same:]])
        deepest = resumable(states, stored)
        if deepest > shared and same < len(prompt) and len(respelled) <= max_context:
            return Candidate(source, deepest, respelled, "text", at)
    usable = min(shared, len(prompt) - 1)
    part = "page" if states is None else "state"
    return Candidate(source, usable, prompt, "end" if usable == len(tokens) else part, at)


@attrs.frozen
class SlotView:
    """A slot without a running request, as :func:`choose_slot` sees it. ``shared`` is what its live conversation has in
    common with the prompt."""

    id: int
    tokens: int
    prompt: int
    used: float
    shared: int


def choose_slot(slots: Sequence[SlotView], resumes: int) -> int:
    """The slot a request should take.

    First the one whose conversation it continues or repeats (the longest shared), provided nothing stored shares more
    than ``resumes`` there; then an empty one; then the one unused longest, whose conversation is parked.
    """
    own = [s for s in slots if s.shared and s.shared >= resumes and (s.shared >= min(s.tokens, max(s.prompt - 1, 1)))]
    if own:
        return max(own, key=lambda s: (s.shared, s.used)).id
    empty = [s for s in slots if not s.tokens]
    if empty:
        return min(s.id for s in empty)
    return min(slots, key=lambda s: (s.used, s.id)).id
