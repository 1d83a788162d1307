"""Names that a user gives models in ``strata.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strata_core.errors import SettingsError

#: The table of them.
TABLE = "models"


def model_names(path: Path, values: Mapping[str, object]) -> dict[str, Path]:
    """The ``[models]`` table of a configuration file: paths by name; relative ones are relative to the file.

    :param path: the file. :param values: its top-level keys.
    :raises SettingsError: it is not a table of paths.
    """
    table = values.get(TABLE, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path} {TABLE}: is {table!r:.80}, not a table of names and paths", param=TABLE)
    names = {}
    for name, value in table.items():
        if not isinstance(value, str) or not value:
            raise SettingsError(f"{path} {TABLE}.{name}: is {value!r:.80}, not the path of a model", param=TABLE)
        names[name] = path.parent / Path(value).expanduser()
    return names
