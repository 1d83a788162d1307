"""The one rule for memory, over every combination of what is available, asked for and below."""

from __future__ import annotations

from itertools import product

import pytest

from strata_core.conversations.placement import Action, Placement, decide

MIB = 1 << 20
NEED, PARKING, TRANSIENT = 100 * MIB, 2560 * MIB, 512 * MIB

#: What is available, named for the floors that then hold.
AVAILABLE = {
    "both floors": NEED + PARKING,
    "not the parking floor": NEED + PARKING - 1,
    "just the transient floor": NEED + TRANSIENT,
    "no floor": NEED + TRANSIENT - 1,
    "nothing": 0,
    "unknown": None,
}


def expected(kind: str, available: str, target: str, lower: bool) -> Action:
    """The specification, spelled out."""
    if available == "unknown":
        return Action.THROUGH if lower else Action.REFUSE  # unknown is never room in RAM
    if available == "both floors":
        return Action.THROUGH if target == "disk" and lower else Action.KEEP
    if available in ("not the parking floor", "just the transient floor"):
        # A park needs somewhere to go through to; a restore is a copy that is used at once.
        return Action.THROUGH if lower or kind != "park" else Action.REFUSE
    return Action.REFUSE


@pytest.mark.parametrize(
    ("kind", "available", "target", "lower"),
    list(product(["park", "restore", "save"], AVAILABLE, ["ram", "disk"], [False, True])),
)
def test_every_combination(kind: str, available: str, target: str, lower: bool) -> None:
    placement = Placement(kind, NEED, AVAILABLE[available], PARKING, TRANSIENT, target, lower)
    verdict = decide(placement)
    assert verdict.action is expected(kind, available, target, lower)
    assert bool(verdict.reason) == (verdict.action is not Action.KEEP)


def test_a_refusal_has_the_arithmetic() -> None:
    reason = decide(Placement("park", NEED, 300 * MIB, PARKING, TRANSIENT)).reason
    assert reason == "need 100 MiB plus 2560 MiB floor; 300 MiB available"


def test_a_park_that_only_keeps_references_needs_the_floor_alone() -> None:
    assert decide(Placement("park", 0, PARKING, PARKING, TRANSIENT)).action is Action.KEEP
    assert decide(Placement("park", 0, PARKING - 1, PARKING, TRANSIENT)).action is Action.REFUSE
