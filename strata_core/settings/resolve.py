"""From command line, environment and ``strata.toml`` to :class:`Settings`.

Precedence: command line, then environment, then file, then default. Every source is read whole: a value that cannot
be parsed is an error also where another source would have won.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from strata_core.errors import SettingsError
from strata_core.settings.core import Settings
from strata_core.settings.kinds import Kind, format_value, near, parse
from strata_core.settings.names import TABLE, model_names
from strata_core.settings.schema import ENV_PREFIX, Setting, SettingsTable, flag_of, settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "strata.toml"
PROCESS_VARIABLES = {
    "STRATA_HOME": "Folder that holds Strata's data, cache and configuration, instead of the system's usual places.",
    "STRATA_CONFIG": "Configuration file, like `--config`.",
    "STRATA_TRACE_HOOKS": "When on, every hook call is written to stderr.",
}
"""Environment variables that are no settings, with what they do."""

OFF = frozenset({"", "0", "off", "no", "false"})
"""Values for which a variable that is a mere switch counts as not set."""


@attrs.frozen
class ConfigFile:
    """A ``strata.toml`` that was read: its path and its top-level keys."""

    path: Path
    values: Mapping[str, object]


@attrs.frozen
class Entry:
    """A value as a source gives it: the name used there (underscores), the raw value and where it stands."""

    name: str
    raw: object
    where: str


@attrs.frozen
class Found:
    """A parsed value and where it stands."""

    value: Any
    where: str


def find_config(explicit: Path | None, environ: Mapping[str, str], folders: Iterable[Path]) -> ConfigFile | None:
    """Read the configuration file: ``explicit``, else ``$STRATA_CONFIG``, else the first in ``folders`` that exists.

    :raises SettingsError: a file that was named does not exist; it cannot be read or is not TOML.
    """
    named = explicit or (Path(environ["STRATA_CONFIG"]) if environ.get("STRATA_CONFIG") else None)
    if named is not None:
        if not named.is_file():
            source = "--config" if explicit else "STRATA_CONFIG"
            raise SettingsError(f"{source}: there is no file {named}", param="config")
        return read_config(named)
    for folder in folders:
        if (folder / CONFIG_NAME).is_file():
            return read_config(folder / CONFIG_NAME)
    return None


def read_config(path: Path) -> ConfigFile:
    """Read one ``strata.toml``.

    :raises SettingsError: it cannot be read or is not TOML; the message has file and line.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin files with a mark
    except RecursionError:
        raise SettingsError(f"{path}: nested too deeply") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    return ConfigFile(path, values)


def resolve(
    table: SettingsTable,
    *,
    command_line: Mapping[str, object],
    environ: Mapping[str, str],
    config: ConfigFile | None,
) -> Settings:
    """Effective settings.

    :param command_line: raw values by the name (underscores; may be an alias) that was used there.
    :raises SettingsError: an unknown name, a value that cannot be parsed or is out of range, or two names of one
        setting with different values within one source. The message names source and name.
    """
    names = table.names()
    found: dict[str, Found] = {}
    for entries in _sources(names, command_line, environ, config):
        found.update(collect(names, entries))
    if config is not None:
        _name_model(found, model_names(config.path, config.values), config)
    return build(table, found)


def _name_model(found: dict[str, Found], names: Mapping[str, Path], config: ConfigFile) -> None:
    """Put the path in place of a name that the configuration file gives a model; ``default`` may be such a name."""
    given = found.get("model")
    name = Settings().model if given is None else given.value
    if name in names:
        where = f"{config.path} {TABLE}.{name}" if given is None else given.where
        found["model"] = Found(str(names[name]), where)


def peek(
    wanted: Iterable[str],
    table: SettingsTable,
    *,
    command_line: Mapping[str, object],
    environ: Mapping[str, str],
    config: ConfigFile | None,
) -> dict[str, Any]:
    """Effective values of the few settings that decide which plugins load, and hence which other names exist.

    Everything else in the sources is left for :func:`resolve` to judge.
    """
    specs = {spec.name: spec for spec in table if spec.name in set(wanted)}
    names = {name: spec for spec in specs.values() for name in spec.names}
    found: dict[str, Found] = {}
    for entries in _sources(names, command_line, environ, config):
        found.update(collect(names, (entry for entry in entries if entry.name in names)))
    return {name: found[name].value if name in found else spec.default for name, spec in specs.items()}


def _sources(
    names: Mapping[str, Setting],
    command_line: Mapping[str, object],
    environ: Mapping[str, str],
    config: ConfigFile | None,
) -> tuple[Iterator[Entry], ...]:
    """The entries of all sources, the weakest source first."""
    return (
        _config_entries(names, config),
        _environment_entries(names, environ),
        (Entry(name, raw, f"command line {flag_of(name)}") for name, raw in command_line.items()),
    )


def collect(names: Mapping[str, Setting], entries: Iterable[Entry]) -> dict[str, Found]:
    """Parse the entries of one source; the result is by setting name.

    :raises SettingsError: see :func:`resolve`.
    """
    found: dict[str, Found] = {}
    for entry in entries:
        spec = names.get(entry.name)
        if spec is None:
            raise SettingsError(
                f"{entry.where}: there is no setting {entry.name!r}{near(entry.name, names)}"
                " (a plugin's settings exist only while it is active: `strata plugins`)",
                param=entry.name,
            )
        try:
            value = parse(spec, entry.raw)
        except ValueError as error:
            shown = "the value is not valid" if spec.secret else str(error)
            raise SettingsError(f"{entry.where}: {shown}", param=spec.name) from None
        earlier = found.get(spec.name)
        if earlier is not None and earlier.value != value:
            texts = ["(hidden)" if spec.secret else format_value(spec, v) for v in (earlier.value, value)]
            raise SettingsError(
                f"{earlier.where} and {entry.where} are names of one setting, but have different values:"
                f" {texts[0]} and {texts[1]}",
                param=spec.name,
            )
        found.setdefault(spec.name, Found(value, entry.where))
    return found


def build(table: SettingsTable, found: Mapping[str, Found]) -> Settings:
    """Make the settings object of parsed values; what is not found has its default."""
    extensions: dict[type[Any], Any] = {}
    for _, cls in table.classes[1:]:
        extensions[cls] = cls(**_given(cls, found))
    sources = {name: value.where for name, value in found.items()}
    return Settings(**_given(Settings, found), sources=sources, extensions=extensions)


def _given(cls: type[Any], found: Mapping[str, Found]) -> dict[str, Any]:
    return {spec.name: found[spec.name].value for spec in settings_of(cls) if spec.name in found}


def _environment_entries(names: Mapping[str, Setting], environ: Mapping[str, str]) -> Iterator[Entry]:
    """An empty variable counts as not set, as container files cannot unset one."""
    switches = {variable: (spec.name, word) for spec in names.values() for variable, word in spec.env_switches.items()}
    for variable, raw in sorted(environ.items()):
        where = f"environment {variable}"
        if variable in switches:
            name, word = switches[variable]
            if raw.lower() not in OFF:
                yield Entry(name, word, where)
        elif variable.startswith(ENV_PREFIX) and variable not in PROCESS_VARIABLES and raw:
            yield Entry(variable.removeprefix(ENV_PREFIX).lower(), raw, where)


def _config_entries(names: Mapping[str, Setting], config: ConfigFile | None) -> Iterator[Entry]:
    """Keys may be written with dashes; relative paths are relative to the file's folder."""
    if config is None:
        return
    for key, raw in config.values.items():
        if key == TABLE:  # names of models, no setting
            continue
        name = key.replace("-", "_")
        spec = names.get(name)
        if isinstance(raw, str) and raw and spec is not None and spec.kind is Kind.PATH:
            yield Entry(name, config.path.parent / Path(raw).expanduser(), f"{config.path} {key}")
        else:
            yield Entry(name, raw, f"{config.path} {key}")
