"""Settings of parking and restoring, in the units the rules compute with."""

from __future__ import annotations

import logging

import attrs

from strata_core.conversations.checkpoints import CheckpointRules
from strata_core.conversations.matching import MatchRules

log = logging.getLogger("strata.cache")


@attrs.frozen
class KeeperOptions:
    """Bytes, seconds, tokens; the flags of the same names are described in ``docs/options.md``.

    :ivar enabled: ``--no-conversation-cache`` turns all reuse off, that of live conversations too.
    :ivar target: ``ram`` or ``disk``, ``auto`` being resolved by now.
    :ivar mirror: whether what stays in RAM is also written to a level below (``spill-on park``).
    :ivar throttle_s: least time between two such writes of one conversation.
    :ivar divergence: position before which a copy that leaves a newer one's history counts as rewritten.
    :ivar weigh_restores: restore only where that is expected to be faster than reading.
    :ivar roots: most system prompts kept for their own sake on a level below RAM, None for no bound; 0 keeps none.
    :ivar checkpoints: which states of models with recurrent state are kept.
    :ivar root_bytes: most bytes they may hold, shared ones counted in full. :ivar root_key: what they are kept under.
    """

    enabled: bool = True
    parking_floor: int = 2560 << 20
    transient_floor: int = 512 << 20
    target: str = "ram"
    mirror: bool = True
    throttle_s: float = 0.0
    divergence: int = 4096
    weigh_restores: bool = True
    roots: int | None = None
    root_bytes: int = 2048 << 20
    root_key: str = ""
    checkpoints: CheckpointRules = attrs.field(factory=CheckpointRules)
    rules: MatchRules = attrs.field(factory=MatchRules)


def park_target(wanted: str, *, below: bool, mirrors: bool, snapshots_fit: bool) -> str:
    """Where a conversation goes when it leaves its slot, ``ram`` or ``disk``, and a line in the log where that is not
    what was asked for.

    :param wanted: ``ram``, ``disk`` or ``auto``.
    :param below: whether there is a level below RAM.
    :param mirrors: whether conversations are written there when they are parked, not only when RAM evicts them.
    :param snapshots_fit: whether RAM can hold one full conversation per slot beside the parking floor.
    """
    target = wanted
    if target == "auto":
        target = "disk" if below and not snapshots_fit else "ram"
        log.info("park target auto -> %s", target)
    if target == "disk" and not below:
        log.warning("parking to disk needs a level below RAM; conversations are parked in RAM instead")
        target = "ram"
    if target == "disk" and not mirrors:
        log.warning("parking to disk needs conversation_cache_spill_on=park; conversations are parked in RAM instead")
        target = "ram"
    return target
