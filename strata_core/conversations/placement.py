"""The one rule for where memory goes: every park, restore and save asks it first.

``available >= need + parking floor``: as asked. Else ``available >= need + transient floor``: through disk, as a copy
that is freed right after. Else: refuse, and a refused park is a discard. Refusing RAM and spilling to disk are not
exclusive: a park that RAM may not keep still goes to disk where a lower level takes it.
"""

from __future__ import annotations

from enum import Enum

import attrs


class Action(Enum):
    """What may be done with the memory asked for."""

    KEEP = "keep"  # in RAM, as asked
    THROUGH = "through"  # only on its way to a lower level, or as a copy freed right after use
    REFUSE = "refuse"  # not at all


@attrs.frozen
class Placement:
    """A question to the admission rules.

    :ivar kind: ``park``, ``restore`` ...
    :ivar need: bytes that would really be allocated: 0 for a park that only keeps references.
    :ivar available: bytes of memory available now; None = unknown, which never counts as room.
    :ivar target: where a park should go: ``ram`` or ``disk``.
    :ivar lower: whether a level below RAM would take it.
    """

    kind: str
    need: int
    available: int | None
    parking_floor: int
    transient_floor: int
    target: str = "ram"
    lower: bool = False


@attrs.frozen
class Verdict:
    """The answer, with the arithmetic in words."""

    action: Action
    reason: str


def decide(p: Placement) -> Verdict:
    """The built-in rule; see the module's docstring. Pure."""
    if p.available is None:
        if p.lower:
            return Verdict(Action.THROUGH, "available memory is unknown")
        return Verdict(Action.REFUSE, "available memory is unknown")
    if p.available >= p.need + p.parking_floor:
        if p.target == "disk" and p.lower:
            return Verdict(Action.THROUGH, "asked to go to disk")
        return Verdict(Action.KEEP, "")
    need = f"need {p.need >> 20} MiB plus {p.parking_floor >> 20} MiB floor; {p.available >> 20} MiB available"
    if p.available >= p.need + p.transient_floor and (p.lower or p.kind != "park"):
        return Verdict(Action.THROUGH, need)
    return Verdict(Action.REFUSE, need)
