"""What a replay came to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs


@attrs.define
class Outcome:
    """Counts of one replay; tokens, bytes, seconds.

    :ivar requests: that ended; :ivar unfinished: that had not when the replay stopped.
    :ivar hits: requests by the source they resumed from, ``none`` for those that resumed from nothing.
    :ivar reused: tokens by source; :ivar read: prompt tokens that were computed.
    :ivar reread: tokens that were computed although they had been before, by reason.
    :ivar rereads: when such tokens were computed: (second, how many).
    :ivar written: bytes written by level.
    :ivar counts: evictions, demotions, disk_evictions, discards, superseded, compacted, spilled, restore_failures.
    :ivar reading_s: seconds in which prompts were read; :ivar restoring_s: seconds of restores, by level.
    :ivar first_token_s: of every request that got there, from arrival to first token.
    :ivar seconds: simulated.
    """

    label: str
    requests: int = 0
    unfinished: int = 0
    prompt: int = 0
    hits: Counter[str] = attrs.field(factory=Counter)
    reused: Counter[str] = attrs.field(factory=Counter)
    read: int = 0
    reread: Counter[str] = attrs.field(factory=Counter)
    rereads: list[tuple[float, int]] = attrs.field(factory=list, repr=False)
    written: dict[str, int] = attrs.field(factory=dict)
    counts: dict[str, int] = attrs.field(factory=dict)
    reading_s: float = 0.0
    restoring_s: dict[str, float] = attrs.field(factory=dict)
    first_token_s: list[float] = attrs.field(factory=list, repr=False)
    seconds: float = 0.0

    @property
    def reread_tokens(self) -> int:
        return sum(self.reread.values())

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return attrs.asdict(self) | {"reread_tokens": self.reread_tokens}
