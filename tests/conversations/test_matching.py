"""Which sequence a prompt resumes from and which slot it takes, as pure decisions."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from strata_core.conversations.identity import Identity
from strata_core.conversations.ladder import Found
from strata_core.conversations.live import Live
from strata_core.conversations.matching import (
    Candidate,
    LiveMatch,
    MatchRules,
    SlotView,
    best_live,
    choose,
    choose_slot,
)
from strata_core.conversations.tokens import common_prefix
from strata_core.store.base import Level
from strata_core.store.ram import RamLevel
from strata_core.testing.scene import LAYOUTS, Scene

CONTEXT = 10_000


@pytest.fixture
def scene() -> Scene:
    return Scene.build(LAYOUTS["one layout"])


@pytest.fixture
def level(scene: Scene) -> Iterator[Level]:
    yield RamLevel(scene.pools, copies=False, max_bytes=1 << 20, max_entries=10)


def ids(*parts: range | list[int]) -> np.ndarray:
    return np.concatenate([np.array(list(part), np.int32) for part in parts])


def live(scene: Scene, tokens: np.ndarray, identity: Identity | None = None, **fields: object) -> Live:
    made = Live.begin(identity or scene.identity, "", scene.pools)
    made.tokens.extend(tokens)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def numbers_only(token: int) -> bytes | None:
    """A tokenizer in which every id spells itself."""
    return b"%d," % token


def decide(
    live: LiveMatch | None, found: Found | None, prompt: np.ndarray, rules: MatchRules | None = None
) -> Candidate | None:
    return choose(live, found, prompt, rules or MatchRules(), numbers_only, CONTEXT)


# -- the live conversation that shares most ---------------------------------------------------------------------------


def test_the_longest_live_prefix_wins_and_ties_go_to_the_latest_used(scene: Scene) -> None:
    short, old, new = (
        live(scene, ids(range(5)), used=9.0),
        live(scene, ids(range(8), [90]), used=1.0),
        live(scene, ids(range(8), [91]), used=2.0),
    )
    match = best_live([(short, False), (old, False), (new, False)], scene.identity.digest, ids(range(20)))
    assert match is not None
    assert (match.live, match.shared, match.busy) == (new, 8, False)


def test_a_busy_conversation_offers_only_complete_pages(scene: Scene) -> None:
    busy = live(scene, ids(range(11)))
    match = best_live([(busy, True)], scene.identity.digest, ids(range(20)))
    assert match is not None
    assert (match.shared, match.busy) == (8, True)
    assert best_live([(live(scene, ids(range(3))), True)], scene.identity.digest, ids(range(20))) is None


def test_a_tenant_never_sees_anothers_conversation(scene: Scene) -> None:
    others = live(scene, ids(range(11)), scene.identity.for_tenant("other"))
    assert best_live([(others, False)], scene.identity.digest, ids(range(20))) is None


def test_a_conversation_that_opted_out_is_not_found(scene: Scene) -> None:
    assert best_live([(live(scene, ids(range(11)), keep=False), False)], scene.identity.digest, ids(range(20))) is None


# -- live or stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live_shares", "stored_shares", "source"),
    [(0, 0, None), (5, 0, "live"), (0, 5, "ram"), (5, 5, "live"), (5, 6, "ram"), (6, 5, "live")],
)
def test_a_stored_copy_is_used_only_where_it_shares_strictly_more(
    scene: Scene, level: Level, live_shares: int, stored_shares: int, source: str | None
) -> None:
    prompt = ids(range(100, 120))
    matched = LiveMatch(live(scene, prompt[:live_shares]), live_shares, False) if live_shares else None
    found = Found(level, scene.entry(prompt[:stored_shares]), stored_shares) if stored_shares else None
    candidate = decide(matched, found, prompt)
    assert (candidate.source if candidate else None) == source
    if candidate is not None:
        assert candidate.shared == max(live_shares, stored_shares)
        assert (candidate.live is None) == (source == "ram")
        assert (candidate.found is None) == (source == "live")


@pytest.mark.parametrize(
    ("stored", "prompt", "shared", "rung", "at"),
    [
        (range(8), range(12), 8, "end", None),  # the next turn
        (range(8), range(8), 7, "page", None),  # the same again: its last token gives the logits
        (range(8), range(5), 4, "page", None),  # a shorter one
        (range(8), [0, 1, 2, 90, 91], 3, "page", 3),  # parts from it
        (range(1), range(1), None, "", None),  # one token is always read
    ],
)
def test_the_last_prompt_token_is_always_read(
    scene: Scene, level: Level, stored: range, prompt: range | list[int], shared: int | None, rung: str, at: int | None
) -> None:
    entry = scene.entry(ids(stored))
    common = common_prefix(entry.tokens, ids(prompt))
    for matched, found in (
        (None, Found(level, entry, common)),
        (LiveMatch(live(scene, entry.tokens), common, False), None),
    ):
        candidate = decide(matched, found, ids(prompt))
        if shared is None:
            assert candidate is None
        else:
            assert candidate is not None
            assert (candidate.shared, candidate.rung, candidate.at) == (shared, rung, at)
            assert np.array_equal(candidate.prompt, ids(prompt))


# -- text that is spelled differently ---------------------------------------------------------------------------------

PIECES = [b"he", b"llo", b"hello", b" ", b"you"]


def spell(token: int) -> bytes | None:
    return PIECES[token] if token < len(PIECES) else None


def test_a_reply_that_tokenises_differently_is_resumed_behind_it(scene: Scene, level: Level) -> None:
    entry = scene.entry(ids([9, 0, 1, 3]))  # <9> he llo space
    candidate = choose(None, Found(level, entry, 1), ids([9, 2, 3, 4]), MatchRules(), spell, CONTEXT)
    assert candidate is not None
    assert (candidate.shared, candidate.rung, candidate.at) == (4, "text", 1)
    assert candidate.prompt.tolist() == [9, 0, 1, 3, 4]


def test_text_is_not_followed_to_the_prompts_end_as_its_last_token_is_read(scene: Scene, level: Level) -> None:
    candidate = choose(None, Found(level, scene.entry(ids([9, 0, 1])), 1), ids([9, 2]), MatchRules(), spell, CONTEXT)
    assert candidate is not None
    assert (candidate.shared, candidate.rung, candidate.prompt.tolist()) == (1, "page", [9, 2])


def test_a_respelling_that_exceeds_the_context_is_not_used(scene: Scene, level: Level) -> None:
    found, prompt = Found(level, scene.entry(ids([9, 0, 1, 3])), 1), ids([9, 2, 3, 4])
    for context, rung in ((5, "text"), (4, "page")):
        candidate = choose(None, found, prompt, MatchRules(), spell, context)
        assert candidate is not None
        assert candidate.rung == rung


def test_the_text_of_a_busy_conversation_is_not_followed(scene: Scene) -> None:
    busy = LiveMatch(live(scene, ids([9, 9, 9, 9, 0, 1, 3])), 4, True)
    candidate = choose(busy, None, ids([9, 9, 9, 9, 2, 3, 4]), MatchRules(), spell, CONTEXT)
    assert candidate is not None
    assert (candidate.shared, candidate.rung) == (4, "page")


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("similarity", "n_min", "shared", "allowed"),
    [
        (0.0, 0, 1, True),
        (0.5, 0, 10, False),  # strictly greater
        (0.5, 0, 11, True),
        (0.0, 10, 9, False),
        (0.0, 10, 10, True),
        (0.9, 5, 10, False),
        (1.0, 0, 19, False),
    ],
)
def test_similarity_and_least_length(
    scene: Scene, level: Level, similarity: float, n_min: int, shared: int, allowed: bool
) -> None:
    prompt = ids(range(20))
    candidate = decide(None, Found(level, scene.entry(prompt[:shared]), shared), prompt, MatchRules(similarity, n_min))
    assert (candidate is not None) == allowed


# -- slots ------------------------------------------------------------------------------------------------------------


def slot(number: int, tokens: int = 0, shared: int = 0, used: float = 0.0, prompt: int | None = None) -> SlotView:
    return SlotView(number, tokens, tokens if prompt is None else prompt, used, shared)


@pytest.mark.parametrize(
    ("case", "slots", "resumes", "chosen"),
    [
        ("its own conversation goes on", [slot(0), slot(1, 100, 100)], 100, 1),
        ("the longest of several", [slot(0, 50, 50), slot(1, 100, 100), slot(2, 70, 70)], 100, 1),
        ("of equals the latest used", [slot(0, 50, 50, 5.0), slot(1, 50, 50, 9.0)], 50, 1),
        ("an empty slot rather than another conversation", [slot(0, 100, 0, 1.0), slot(1)], 0, 1),
        ("the lowest empty one", [slot(2), slot(1), slot(3)], 0, 1),
        ("the one unused longest", [slot(0, 9, 0, 5.0), slot(1, 9, 0, 3.0), slot(2, 9, 0, 4.0)], 0, 1),
        ("the same prompt again, reply and all", [slot(0), slot(1, 120, 99, prompt=100)], 99, 1),
        ("one token more than the prompt was", [slot(0), slot(1, 120, 100, prompt=100)], 100, 1),
        ("a shared system prompt is not one's own", [slot(0, 3000, 2000), slot(1)], 2000, 1),
        ("15 % in common: the other slot", [slot(0, 100, 15, 9.0), slot(1, 100, 0, 1.0)], 15, 1),
        ("15 % in common: not even if used last", [slot(0, 100, 15, 1.0), slot(1, 100, 15, 9.0)], 15, 0),
        ("a longer stored copy: its slot is not taken over", [slot(0, 50, 50, 9.0), slot(1)], 80, 1),
    ],
)
def test_the_slot_that_loses_least(case: str, slots: list[SlotView], resumes: int, chosen: int) -> None:
    assert choose_slot(slots, resumes) == chosen, case


def test_two_conversations_with_a_common_beginning_keep_their_slots() -> None:
    """Taking turns, each finds its own slot every time, whatever the order of use."""
    slots = [slot(0, 100, 0, 1.0), slot(1, 100, 0, 2.0)]
    for turn in range(10):
        mine = turn % 2
        views = [attrs.evolve(view, shared=view.tokens if view.id == mine else 15) for view in slots]
        assert choose_slot(views, views[mine].shared) == mine
        grown = slots[mine].tokens + 10
        slots[mine] = attrs.evolve(slots[mine], tokens=grown, prompt=grown - 5, used=3.0 + turn)


def test_children_of_one_prompt_leave_the_parent_its_slot() -> None:
    """A parent of 1,500 tokens whose slot is free; two children begin with its system prompt of 500."""
    slots = [slot(0, 1500, 500, 3.0), slot(1), slot(2)]
    first = choose_slot(slots, 500)
    assert first == 1
    slots[1] = slot(1, 2000, 500, 4.0)
    assert choose_slot(slots, 500) == 2
    slots[2] = slot(2, 2000, 500, 5.0)
    assert choose_slot([attrs.evolve(slots[0], shared=1500), *slots[1:]], 1500) == 0


@pytest.mark.parametrize("call", range(5))
def test_all_of_a_long_common_prefix_is_reused_whatever_the_tail(scene: Scene, level: Level, call: int) -> None:
    system, tail = ids(range(2000)), ids([5000 + call, *range(30)])
    entry = scene.entry(ids(list(system), [4999, *range(40)]))
    candidate = decide(None, Found(level, entry, 2000), ids(list(system), list(tail)))
    assert candidate is not None
    assert candidate.shared == 2000
