"""A click group whose commands are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

import attrs
import click

from strata_core.errors import PluginError


@attrs.frozen
class Reference:
    """Where a command is: ``package.module:attribute``, and its line in the list of commands."""

    target: str
    short_help: str

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, click.Command):
            raise PluginError(f"{self.target} is not a click command")
        return found


class LazyGroup(click.Group):
    """A group that also has commands by reference, and refuses to replace one command by another."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.references: dict[str, Reference] = {}

    def add_lazy(self, name: str, target: str, short_help: str) -> None:
        """Add the command at ``target`` (``package.module:attribute``) without importing it.

        :raises PluginError: there is a command of this name.
        """
        self._check_free(name)
        self.references[name] = Reference(target, short_help)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command.

        :raises PluginError: there is a command of this name.
        """
        self._check_free(name or cmd.name or "")
        super().add_command(cmd, name)

    def _check_free(self, name: str) -> None:
        if name in self.references:
            raise PluginError(f"command {name!r} is already there: {self.references[name].target}")
        if name in self.commands:
            raise PluginError(f"command {name!r} is already there: {_where(self.commands[name])}")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*self.commands, *self.references])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.references:
            return self.references[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def short_helps(self) -> dict[str, str]:
        """The line of every command in the list, without importing those that are references."""
        lines = {name: command.get_short_help_str(limit=90) for name, command in self.commands.items()}
        return lines | {name: reference.short_help for name, reference in self.references.items()}


def _where(command: click.Command) -> str:
    return getattr(command.callback, "__module__", None) or repr(command)
