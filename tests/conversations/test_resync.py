"""Where two tokenisations of a text line up again, against brute force over all pairs of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.conversations.resync import MAX_BYTES, align

#: Ids 0 and 1 are control tokens, the others spell these bytes; "a" + "b" = "ab" and so on.
SPELLING = [None, None, b"a", b"b", b"ab", b"ba", b"aa", b"aba"]
CONTROL = {0: b"\x00", 1: b"\x01"}  # as if they had a spelling that nothing else has

ids = st.lists(st.integers(0, len(SPELLING) - 1), max_size=9)


def spell(token: int) -> bytes | None:
    return SPELLING[token]


def text(tokens: list[int]) -> bytes:
    return b"".join(CONTROL.get(token, SPELLING[token] or b"") for token in tokens)


def aligned(stored: list[int], prompt: list[int], start: int) -> tuple[int, int]:
    return align(np.array(stored, np.int32), np.array(prompt, np.int32), start, spell)


def brute_force(stored: list[int], prompt: list[int], start: int) -> tuple[int, int]:
    pairs = [(i, j) for i in range(start, len(stored) + 1) for j in range(start, len(prompt) + 1)]
    return max(pair for pair in pairs if text(stored[: pair[0]]) == text(prompt[: pair[1]]))


@given(ids, ids)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_the_deepest_common_boundary_is_found(stored: list[int], prompt: list[int]) -> None:
    assert aligned(stored, prompt, 0) == brute_force(stored, prompt, 0)


@given(ids, ids, ids)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_search_begins_where_ids_part(head: list[int], stored: list[int], prompt: list[int]) -> None:
    start = len(head)
    assert aligned(head + stored, head + prompt, start) == brute_force(head + stored, head + prompt, start)


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=12), st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_two_spellings_of_one_text_line_up_at_its_end(letters: list[str], data: st.DataObject) -> None:
    whole = "".join(letters).encode()

    def cut() -> list[int]:
        tokens, rest = [], whole
        while rest:
            fitting = [t for t, piece in enumerate(SPELLING) if piece and rest.startswith(piece)]
            tokens.append(data.draw(st.sampled_from(fitting)))
            rest = rest[len(SPELLING[tokens[-1]] or b"") :]
        return tokens

    stored, prompt = cut(), cut()
    assert aligned(stored, prompt, 0) == (len(stored), len(prompt))


def test_a_control_token_never_matches_its_text() -> None:
    def spelled(token: int) -> bytes | None:
        return {0: None, 1: b"<end>", 2: b"x"}[token]

    stored, prompt = np.array([2, 0, 2], np.int32), np.array([2, 1, 2], np.int32)
    assert align(stored, prompt, 1, spelled) == (1, 1)


def test_texts_that_never_line_up_are_given_up_after_a_bound() -> None:
    asked = 0

    def spelled(token: int) -> bytes | None:
        nonlocal asked
        asked += 1
        return bytes(1 << 16) if token == 0 else bytes((1 << 16) - 1)

    long = np.zeros(1 << 12, np.int32)
    assert align(long, long + 1, 0, spelled) == (0, 0)
    assert asked <= MAX_BYTES // ((1 << 16) - 1) + 2


@pytest.mark.parametrize(("stored", "prompt"), [([], []), ([4], []), ([], [4]), ([2], [4]), ([4], [2])])
def test_nothing_lines_up_where_one_side_ends_first(stored: list[int], prompt: list[int]) -> None:
    assert aligned(stored, prompt, 0) == (0, 0)
