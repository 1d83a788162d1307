"""``strata inspect``: what a model file holds."""

from __future__ import annotations

import click

from strata_core.cli.app import application


@click.command()
@click.argument("file")
@click.pass_context
def inspect(context: click.Context, file: str) -> None:
    """Show architecture, sizes, tokenizer and chat template of a model FILE, and what of it is unsupported.

    FILE is a path, or the name of an installed model ("default" for the default model).
    """
    from rich.console import Console

    from strata_core.weights.catalogue import resolve
    from strata_core.weights.inspect import describe, render

    families = application(context).plugins.families()
    architectures = {name for family in families.values() for name in family.architectures}
    render(describe(resolve(file), architectures), Console())
