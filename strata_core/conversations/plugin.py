"""The built-in admission rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.conversations.placement import Placement, Verdict


@hookimpl(trylast=True)
def strata_admit(placement: Placement) -> Verdict | None:
    """Decide by the two floors; any other plugin's answer goes first."""
    from strata_core.conversations.placement import decide

    return decide(placement)
