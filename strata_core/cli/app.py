"""What the commands of one run share: early options, configuration file, plugins, commands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import click

from strata_core.cli.lazy import LazyGroup
from strata_core.errors import SettingsError
from strata_core.paths import config_home
from strata_core.plugins import Plugins
from strata_core.settings import CORE, ConfigFile, Settings, find_config, peek, resolve

EARLY = ("config", "plugins", "disable_plugins")
"""Options that decide which other options exist; they are read before the command line is parsed."""


def early_options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Values of the early options wherever they stand before ``--``. Does not complain: the parser will."""
    found: dict[str, list[str]] = {}
    flags = {"--" + name.replace("_", "-"): name for name in EARLY}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        flag, assigned, value = argument.partition("=")
        if flag in flags:
            given = value if assigned else next(rest, None)
            if given is not None:
                found.setdefault(flags[flag], []).append(given)
    return found


@attrs.define(slots=False)
class Application:
    """The ``obj`` of the root context. Everything is made on first use.

    :ivar arguments: the command line, without the program's name.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str] = attrs.field(default=os.environ, repr=False)

    @cached_property
    def early(self) -> dict[str, list[str]]:
        return early_options(self.arguments)

    @cached_property
    def config(self) -> ConfigFile | None:
        """The configuration file.

        :raises SettingsError: it is named but missing, or it is not readable TOML.
        """
        named = self.early.get("config")
        if named and not named[-1]:
            raise SettingsError("command line --config: the path is empty", param="config")
        return find_config(Path(named[-1]) if named else None, self.environ, (Path(), config_home()))

    @cached_property
    def plugins(self) -> Plugins:
        """The plugins, loaded as command line, environment and configuration file say.

        :raises PluginError: one that was asked for failed.
        """
        chosen = peek(
            ("plugins", "disable_plugins"),
            CORE,
            command_line=self._early_settings(),
            environ=self.environ,
            config=self.config,
        )
        return Plugins.load(self.environ, chosen["plugins"], chosen["disable_plugins"])

    @cached_property
    def commands(self) -> LazyGroup:
        """The commands of all plugins, the built-in ones among them."""
        group = LazyGroup("strata")
        self.plugins.commands(group)
        return group

    def settings(self, command_line: Mapping[str, object]) -> Settings:
        """Effective settings, given what the command's own options say.

        :raises SettingsError: see :func:`strata_core.settings.resolve`.
        """
        return resolve(
            self.plugins.settings(),
            command_line=dict(command_line) | self._early_settings(),
            environ=self.environ,
            config=self.config,
        )

    def _early_settings(self) -> dict[str, object]:
        """Early options that are settings, split like the options of a command."""
        return {name: split_repeated(values) for name, values in self.early.items() if name != "config"}


def split_repeated(values: Sequence[str]) -> tuple[str, ...]:
    """Items of a list option: the flag may be repeated, and each value may hold several, comma-separated."""
    return tuple(item.strip() for value in values for item in value.split(",") if item.strip())


def application(ctx: click.Context) -> Application:
    """The run's :class:`Application`."""
    found: Any = ctx.find_object(Application)
    if found is None:
        raise RuntimeError("this command was not invoked through `strata`")
    app: Application = found
    return app
