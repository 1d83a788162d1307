"""``strata inspect``: what a model holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from strata_core.cli.app import application
from strata_core.errors import ModelFileError

if TYPE_CHECKING:
    from strata_core.weights.source import WeightSource


@click.command()
@click.argument("model")
@click.pass_context
def inspect(context: click.Context, model: str) -> None:
    """Show architecture, sizes, tokenizer and chat template of a MODEL, and what of it is unsupported.

    MODEL is the path of a GGUF file or a Hugging Face folder, the name of an installed model, or one that strata.toml
    gives ("default" for the default model).
    """
    from rich.console import Console

    from strata_core.settings.names import model_names
    from strata_core.weights.catalogue import resolve
    from strata_core.weights.inspect import describe, render

    app = application(context)
    families = app.plugins.families()
    named = model_names(app.config.path, app.config.values) if app.config else {}
    architectures = {name for family in families.values() for name in family.architectures}
    render(describe(named.get(model) or resolve(model), architectures, (_tokenizer_problems,)), Console())


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
