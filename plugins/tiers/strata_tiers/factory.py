"""Makes the levels and the archive that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from strata_core.errors import LevelError, SettingsError
from strata_core.paths import cache_home
from strata_core.store.base import LevelContext, LevelFactory
from strata_tiers.archive import DiskArchive
from strata_tiers.cut import Limits
from strata_tiers.directory import ARCHIVE
from strata_tiers.layout import Shape
from strata_tiers.level import DAY_S, DiskLevel, LevelOptions, Workshop
from strata_tiers.settings import DiskSettings
from strata_tiers.shelf import ArchiveOptions

T = TypeVar("T")


def factories() -> list[LevelFactory]:
    """Warm and cold level, that of system prompts, and the archive; those of the same engine share a writer."""
    shop = _Shop()
    return [
        LevelFactory("warm", 10, shop.warm),
        LevelFactory("cold", 20, shop.cold),
        LevelFactory("system-prompt", 40, shop.roots),
        LevelFactory("archive", DiskArchive.rank, shop.archive),
    ]


def cold_folder(settings: DiskSettings) -> Path:
    """Where the cold level is."""
    return settings.conversation_cache_cold_dir or cache_home() / "conversations"


def archive_folder(settings: DiskSettings) -> Path:
    """Where the archive is."""
    return settings.conversation_cache_archive_dir or cold_folder(settings) / ARCHIVE


class _Shop:
    """Remembers the workshop of the engine whose levels are being made: all factories get the same context."""

    def __init__(self) -> None:
        self._context: LevelContext | None = None
        self._workshop: Workshop | None = None
        self._folders: dict[Path, str] = {}

    def warm(self, context: LevelContext) -> DiskLevel | None:
        settings = _settings(context)
        if settings is None:
            return None
        folder, mib = settings.conversation_cache_warm_dir, settings.conversation_cache_warm_mib
        if folder is None or not mib:
            return None
        return self._level("warm", 10, folder, "conversation_cache_warm_dir", _options(context, settings, mib), context)

    def cold(self, context: LevelContext) -> DiskLevel | None:
        settings = _settings(context)
        if settings is None or not settings.conversation_cache_cold_mib:
            return None
        folder, options = cold_folder(settings), _options(context, settings, settings.conversation_cache_cold_mib)
        return self._level("cold", 20, folder, "conversation_cache_cold_dir", options, context)

    def roots(self, context: LevelContext) -> DiskLevel | None:
        core, settings = context.settings, _settings(context)
        folder, mib = core.system_prompt_cache_dir, core.system_prompt_cache_mib
        if settings is None or folder is None or not core.system_prompt_cache or not mib:
            return None
        options = _options(context, settings, mib, for_roots=True)
        return self._level("system-prompt", 40, folder, "system_prompt_cache_dir", options, context)

    def archive(self, context: LevelContext) -> DiskArchive | None:
        settings = _settings(context)
        if settings is None or settings.conversation_cache_archive_mode == "off":
            return None
        options = ArchiveOptions(
            mode=settings.conversation_cache_archive_mode,  # type: ignore[arg-type]  # one of the choices
            max_bytes=settings.conversation_cache_archive_mib << 20,
            keep=settings.conversation_cache_archive_keep,
            max_age_s=settings.conversation_cache_archive_max_age_days * DAY_S,
        )
        workshop, limits = self._shared(context), Limits(max_tokens=settings.conversation_cache_segment_tokens)

        def make(folder: Path) -> DiskArchive:
            return DiskArchive(folder, context.identity, _shape(context), options, workshop, limits)

        folder = archive_folder(settings)
        return self._make("archive", folder, "conversation_cache_archive_dir", make)

    def _level(
        self, name: str, rank: int, folder: Path, param: str, options: LevelOptions, context: LevelContext
    ) -> DiskLevel:
        workshop = self._shared(context)

        def make(where: Path) -> DiskLevel:
            return DiskLevel(name, rank, where, context.identity, _shape(context), options, workshop)

        return self._make(name, folder, param, make)

    def _make(self, name: str, folder: Path, param: str, make: Callable[[Path], T]) -> T:
        """:param param: the setting that names the folder.

        :raises SettingsError: another has it. :raises LevelError: it cannot be used.
        """
        other = self._folders.get(folder.resolve())
        if other is not None:
            raise SettingsError(f"{other} and {name} cannot both be in {folder}", param=param)
        try:
            made = make(folder)
        except LevelError as error:
            raise LevelError(f"{error.message}; choose another with --{param.replace('_', '-')}") from error
        self._folders[folder.resolve()] = name
        return made

    def _shared(self, context: LevelContext) -> Workshop:
        if self._workshop is None or self._context is not context or not self._workshop.members:
            self._workshop, self._folders = Workshop(), {}
        self._context = context
        return self._workshop


def _options(context: LevelContext, settings: DiskSettings, mib: int, *, for_roots: bool = False) -> LevelOptions:
    return LevelOptions(
        max_bytes=mib << 20,
        when_full=settings.conversation_cache_spill_when_full,  # type: ignore[arg-type]  # one of the choices
        max_age_s=settings.conversation_cache_spill_max_age_days * DAY_S,
        root_max_age_s=context.settings.system_prompt_cache_max_age_days * DAY_S,
        root_key=context.settings.system_prompt_cache_key,
        for_roots=for_roots,
        limits=Limits(max_tokens=settings.conversation_cache_segment_tokens),
    )


def _shape(context: LevelContext) -> Shape:
    states = context.state_pool
    pages = tuple(pool.layout.nbytes for pool in context.pools)
    return Shape(context.page_tokens, pages, 0 if states is None else states.layout.nbytes)


def _settings(context: LevelContext) -> DiskSettings | None:
    """The plugin's settings; None for a program that made its settings without asking plugins for theirs, and so asked
    for no disk."""
    try:
        return context.settings.plugin(DiskSettings)
    except SettingsError:
        return None
