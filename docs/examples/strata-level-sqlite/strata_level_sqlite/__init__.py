"""A Strata plugin that keeps conversations in one SQLite file, below RAM.

This module is imported by every ``strata`` command, so it imports nothing heavy; the level itself is in ``level.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from strata_core.hookspecs import hookimpl
from strata_core.settings import Kind, setting

if TYPE_CHECKING:
    from strata_core.store.base import Level, LevelContext, LevelFactory


@attrs.frozen(kw_only=True)
class SqliteSettings:
    """Options of this plugin: flags, ``strata.toml`` keys and variables of these names."""

    sqlite_level_path: Path | None = setting(
        None, kind=Kind.PATH, section="SQLite level", help="File that keeps conversations; without it, none is kept."
    )
    sqlite_level_mib: int = setting(
        1024, kind=Kind.SIZE, minimum=1, section="SQLite level", help="Most that the file may hold."
    )


@hookimpl
def strata_register_settings(register: Callable[[type[Any]], None]) -> None:
    register(SqliteSettings)


@hookimpl
def strata_register_levels(register: Callable[[LevelFactory], None]) -> None:
    from strata_core.store.base import LevelFactory

    register(LevelFactory("sqlite", 15, _create))


def _create(context: LevelContext) -> Level | None:
    settings = context.settings.plugin(SqliteSettings)
    if settings.sqlite_level_path is None:
        return None
    from strata_level_sqlite.level import SqliteLevel

    return SqliteLevel(settings.sqlite_level_path, context.pools, settings.sqlite_level_mib << 20)
