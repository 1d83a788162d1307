"""The agenda decides how a step's rows are shared; every small situation is tried."""

from __future__ import annotations

import itertools

import pytest

from strata_core.engine.agenda import Reader, share_rows

CHUNK, BUDGET, AGE = 8, 10, 3


def share(decoders: int, *readers: tuple[int, int]) -> dict[int, int]:
    return share_rows(
        decoders, [Reader(i, left, starved) for i, (left, starved) in enumerate(readers)],
        chunk=CHUNK, budget=BUDGET, age=AGE,
    )  # fmt: skip


SITUATIONS = [
    (decoders, tuple(readers))
    for decoders in range(0, 13)
    for count in range(0, 3)
    for readers in itertools.product(itertools.product((1, 2, 7, 8, 30), (0, 2, 3)), repeat=count)
]


def test_the_rules_hold_in_every_situation() -> None:
    for decoders, readers in SITUATIONS:
        shares = share(decoders, *readers)
        for slot, rows in shares.items():
            assert 1 <= rows <= min(CHUNK, readers[slot][0]), (decoders, readers)
        if readers:
            assert 0 in shares, "the first reader always gets something"
        for slot, (left, starved) in enumerate(readers):
            if starved >= AGE:
                assert shares[slot] == min(CHUNK, left), "a starved reader gets a full chunk"
        if all(starved < AGE for _, starved in readers):
            allowed = max(BUDGET, decoders + 1) if decoders else max(BUDGET, CHUNK)
            assert decoders + sum(shares.values()) <= allowed, (decoders, readers)


@pytest.mark.parametrize(
    ("decoders", "readers", "expected"),
    [
        (0, [(100, 0)], {0: 8}),  # nobody decodes: a full chunk
        (1, [(100, 0)], {0: 8}),  # the budget leaves a full chunk
        (4, [(100, 0)], {0: 6}),  # decode rows come first
        (10, [(100, 0)], {0: 1}),  # nothing left: still one row
        (12, [(100, 0)], {0: 1}),
        (12, [(100, 3)], {0: 8}),  # starved for long enough
        (0, [(5, 0), (4, 0)], {0: 5, 1: 4}),  # what the first leaves finishes the second
        (0, [(5, 0), (100, 0)], {0: 5}),  # but a crumb of a long prompt is not worth a row
        (4, [(2, 0), (100, 1), (3, 0)], {0: 2, 2: 3}),
    ],
)
def test_named_situations(decoders: int, readers: list[tuple[int, int]], expected: dict[int, int]) -> None:
    assert share(decoders, *readers) == expected


def test_every_prompt_is_read_whatever_the_load() -> None:
    left = dict.fromkeys(range(3), 40)
    starved = dict.fromkeys(range(3), 0)
    for _ in range(200):
        order = [s for s in sorted(left) if left[s]]
        if not order:
            return
        shares = share_rows(
            9, [Reader(s, left[s], starved[s]) for s in order], chunk=CHUNK, budget=BUDGET, age=AGE
        )
        for slot in order:
            starved[slot] = 0 if slot in shares else starved[slot] + 1
            left[slot] -= shares.get(slot, 0)
            assert starved[slot] <= AGE, "no reader waits longer than the age"
    raise AssertionError(f"prompts were not read: {left}")
