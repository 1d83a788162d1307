"""The root of the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from strata_core import __version__
from strata_core.cli.app import Application, application
from strata_core.errors import StrataError


class RootGroup(click.Group):
    """Takes its commands from the plugins, and ends with one line and the right status on reported errors."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("obj", Application(tuple(args)))
        return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return application(ctx).commands.list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return application(ctx).commands.get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(application(ctx).commands.short_helps().items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        except StrataError as error:
            if not standalone_mode:
                raise
            click.echo(f"strata: error: {error.message}", err=True)
            sys.exit(error.exit_code)


@click.group("strata", cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="strata %(version)s")
@click.option("--config", metavar="FILE", expose_value=False, help="Configuration file instead of strata.toml.")
@click.option("--plugins", metavar="NAME", multiple=True, expose_value=False, help="Plugin that must load.")
@click.option("--disable-plugins", metavar="NAME", multiple=True, expose_value=False, help="Plugin not to load.")
def main() -> None:
    """Serve large language models; conversations outlive memory."""
