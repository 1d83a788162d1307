"""The built-in level: RAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.store.base import Level, LevelContext, LevelFactory


@hookimpl
def strata_register_levels(register: Callable[[LevelFactory], None]) -> None:
    """Register the RAM level."""
    from strata_core.store.base import LevelFactory

    register(LevelFactory("ram", 0, _create))


def _create(context: LevelContext) -> Level | None:
    from strata_core.store.ram import RamLevel

    if not context.ram_budget:
        return None
    return RamLevel(
        context.host_pools or context.pools,
        copies=context.host_pools is not None,
        max_bytes=context.ram_budget,
        max_entries=context.settings.conversation_cache_slots,
        state_pool=context.host_state_pool or context.state_pool,
    )
