"""Makes the levels that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from strata_core.errors import LevelError, SettingsError
from strata_core.paths import cache_home
from strata_core.store.base import Level, LevelContext, LevelFactory
from strata_tiers.cut import Limits
from strata_tiers.layout import Shape
from strata_tiers.level import DAY_S, DiskLevel, LevelOptions, Workshop
from strata_tiers.settings import DiskSettings


def factories() -> list[LevelFactory]:
    """The warm and the cold level of one engine after the other; those of the same engine share a writer."""
    shop = _Shop()
    return [LevelFactory("warm", 10, shop.warm), LevelFactory("cold", 20, shop.cold)]


def cold_folder(settings: DiskSettings) -> Path:
    """Where the cold level is."""
    return settings.conversation_cache_cold_dir or cache_home() / "conversations"


class _Shop:
    """Remembers the workshop of the engine whose levels are being made: both factories get the same context."""

    def __init__(self) -> None:
        self._context: LevelContext | None = None
        self._workshop: Workshop | None = None

    def warm(self, context: LevelContext) -> Level | None:
        settings = _settings(context)
        if settings is None:
            return None
        folder, mib = settings.conversation_cache_warm_dir, settings.conversation_cache_warm_mib
        return self._make("warm", 10, folder, mib, context) if folder is not None and mib else None

    def cold(self, context: LevelContext) -> Level | None:
        settings = _settings(context)
        if settings is None or not settings.conversation_cache_cold_mib:
            return None
        folder, warm = cold_folder(settings), settings.conversation_cache_warm_dir
        if warm is not None and settings.conversation_cache_warm_mib and warm.resolve() == folder.resolve():
            raise SettingsError(
                f"the warm and the cold level cannot both be in {folder}", param="conversation_cache_cold_dir"
            )
        return self._make("cold", 20, folder, settings.conversation_cache_cold_mib, context)

    def _make(self, name: str, rank: int, folder: Path, mib: int, context: LevelContext) -> Level:
        settings = _settings(context)
        assert settings is not None
        if self._workshop is None or self._context is not context or not self._workshop.levels:
            self._workshop = Workshop()
        self._context = context
        options = LevelOptions(
            max_bytes=mib << 20,
            when_full=settings.conversation_cache_spill_when_full,  # type: ignore[arg-type]  # one of the choices
            max_age_s=settings.conversation_cache_spill_max_age_days * DAY_S,
            limits=Limits(max_tokens=settings.conversation_cache_segment_tokens),
        )
        shape = Shape(context.page_tokens, tuple(pool.layout.nbytes for pool in context.pools))
        try:
            return DiskLevel(name, rank, folder, context.identity, shape, options, self._workshop)
        except LevelError as error:
            raise LevelError(f"{error.message}; choose another with --conversation-cache-{name}-dir") from error


def _settings(context: LevelContext) -> DiskSettings | None:
    """The plugin's settings; None for a program that made its settings without asking plugins for theirs, and so asked
    for no disk."""
    try:
        return context.settings.plugin(DiskSettings)
    except SettingsError:
        return None
