"""``strata inspect``: what a model file holds."""

from __future__ import annotations

import click


@click.command()
@click.argument("file")
@click.pass_context
def inspect(context: click.Context, file: str) -> None:
    """Show architecture, sizes, tokenizer and chat template of a model FILE, and what of it is unsupported.

    FILE is a path, or the name of an installed model ("default" for the default model).
    """
    from rich.console import Console

    from ..plugins import Plugins
    from ..weights.catalogue import resolve
    from ..weights.inspect import describe, render

    plugins = context.find_object(Plugins) or Plugins.load()
    architectures = {name for family in plugins.families().values() for name in family.architectures}
    render(describe(resolve(file), architectures), Console())
