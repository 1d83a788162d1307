"""``strata inspect``: what a model file holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from strata_core.cli.app import application
from strata_core.errors import ModelFileError

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


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
    render(describe(resolve(file), architectures, (_tokenizer_problems,)), Console())


def _tokenizer_problems(source: WeightSource) -> Iterator[str]:
    """Why text cannot become tokens with this file, or messages no prompt."""
    from strata_core.tokens import ChatTemplate, Tokenizer

    try:
        tokenizer = Tokenizer.from_metadata(source.metadata)
        template = ChatTemplate.from_metadata(source.metadata, tokenizer)
    except ModelFileError as error:
        yield error.message
        return
    if template is not None and template.error is not None:
        yield template.error.message
