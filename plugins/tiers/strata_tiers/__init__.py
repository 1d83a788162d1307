"""Warm and cold levels: conversations on disk. Every ``strata`` command imports this module, so it stays light."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.cli.lazy import LazyGroup
    from strata_core.store.base import LevelFactory


@hookimpl
def strata_register_settings(register: Callable[[type[Any]], None]) -> None:
    """Register the options of the disk levels."""
    from strata_tiers.settings import DiskSettings

    register(DiskSettings)


@hookimpl
def strata_register_commands(cli: LazyGroup) -> None:
    """Add ``strata cache``."""
    cli.add_lazy("cache", "strata_tiers.commands.group:cache", "Look after stored conversations, without a server.")


@hookimpl
def strata_register_levels(register: Callable[[LevelFactory], None]) -> None:
    """Register the levels ``warm``, ``cold`` and ``system-prompt``, and the archive."""
    from strata_tiers.factory import factories

    for factory in factories():
        register(factory)
