"""What can be known to be wrong before a server starts: found in the parent, without touching a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.errors import SettingsError, UnsupportedModel
from strata_core.settings import Settings
from strata_core.weights.catalogue import resolve
from strata_core.weights.shards import open_model

if TYPE_CHECKING:
    from strata_core.plugins import Plugins


def check(settings: Settings, plugins: Plugins) -> None:
    """Find the model, read its header and see that something installed can run it.

    :raises NotFound: there is no such model. :raises ModelFileError: its header is damaged.
    :raises UnsupportedModel: no family runs its architecture. :raises SettingsError: a folder cannot be one.
    """
    folder = settings.session_save_path
    if folder is not None and folder.expanduser().exists() and not folder.expanduser().is_dir():
        raise SettingsError(f"session_save_path: {folder} is no folder", param="session_save_path")
    path = resolve(settings.model)
    with open_model(path) as file:
        architecture = file.require_key("general.architecture", str)
    known = sorted(name for family in plugins.families().values() for name in family.architectures)
    if architecture not in known:
        raise UnsupportedModel(
            f"{path}: architecture {architecture!r} is not supported; supported are {', '.join(known)}",
            param="general.architecture",
        )
