"""Settings: declared once, read from command line, environment and ``strata.toml``."""

from strata_core.settings.core import CORE, BatchAgenda, Settings
from strata_core.settings.kinds import Kind
from strata_core.settings.resolve import ConfigFile, find_config, peek, resolve
from strata_core.settings.schema import Setting, SettingsTable, setting, settings_of

__all__ = [
    "CORE",
    "BatchAgenda",
    "ConfigFile",
    "Kind",
    "Setting",
    "Settings",
    "SettingsTable",
    "find_config",
    "peek",
    "resolve",
    "setting",
    "settings_of",
]
