"""Where Strata keeps its files.

``STRATA_HOME`` puts everything under one folder. Without it each platform's own places are used: the XDG base
directories (also honoured on macOS where their variables are set), ``~/Library`` on macOS, ``%LOCALAPPDATA%`` on
Windows. In this order (STRATA_HOME, Linux, macOS, Windows):

* ``data_home()``: ``$STRATA_HOME``, ``~/.local/share/strata``, ``~/Library/Application Support/strata``,
  ``%LOCALAPPDATA%\\strata``
* ``cache_home()``: ``$STRATA_HOME/cache``, ``~/.cache/strata``, ``~/Library/Caches/strata``,
  ``%LOCALAPPDATA%\\strata\\cache``
* ``config_home()``: ``$STRATA_HOME``, ``~/.config/strata``; on macOS and Windows as data

The functions only name folders; whoever writes into one creates it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NAME = "strata"


def strata_home() -> Path | None:
    """The folder of ``STRATA_HOME``, absolute; None when the variable is unset or empty."""
    value = os.environ.get("STRATA_HOME", "")
    return Path(value).expanduser().absolute() if value else None


def data_home() -> Path:
    """What is kept for good: models."""
    return strata_home() or _place("XDG_DATA_HOME", ".local/share", "Library/Application Support")


def cache_home() -> Path:
    """What may be deleted at the cost of computing it again: stored conversations."""
    home = strata_home()
    if home:
        return home / "cache"
    place = _place("XDG_CACHE_HOME", ".cache", "Library/Caches")
    return place / "cache" if sys.platform == "win32" else place


def config_home() -> Path:
    """Where ``strata.toml`` is looked for beside the working directory."""
    return strata_home() or _place("XDG_CONFIG_HOME", ".config", "Library/Application Support")


def models_dir() -> Path:
    """The installed models."""
    return data_home() / "models"


def _place(variable: str, linux: str, macos: str) -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", "")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / _NAME
    configured = Path(os.environ.get(variable, ""))
    if configured.is_absolute():  # relative values are to be ignored, says the XDG specification
        return configured / _NAME
    return Path.home() / (macos if sys.platform == "darwin" else linux) / _NAME
