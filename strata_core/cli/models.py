"""``strata models``: the models that can be served."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from strata_core.cli.app import application
from strata_core.errors import NotFound, StrataError
from strata_core.paths import models_dir

if TYPE_CHECKING:
    from strata_core.weights.catalogue import InstalledModel


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List and fetch models; alone, it lists them."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list")
@click.pass_context
def list_models(context: click.Context) -> None:
    """List the models in the models folder, and those that strata.toml names.

    Each with its size and architecture, and the reason if it cannot be run.
    """
    from strata_core.settings.names import model_names
    from strata_core.weights.catalogue import DEFAULT, DEFAULT_FILE, installed, model_at
    from strata_core.weights.inspect import printable

    app = application(context)
    named = model_names(app.config.path, app.config.values) if app.config else {}
    found = [*(model_at(name, path) for name, path in named.items()), *installed()]
    if not found:
        click.echo(f"no models in {models_dir()}; get the default one with: strata models pull {DEFAULT}", err=True)
        return
    architectures = {name for family in app.plugins.families().values() for name in family.architectures}
    rows = []
    for model in found:
        name = f"{model.name} ({DEFAULT})" if model.path.name == DEFAULT_FILE else model.name
        rows.append((name, f"{model.size / 2**20:,.1f} MiB", *_state(model, architectures)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, size, architecture, state in rows:
        line = f"{name:<{widths[0]}}  {size:>{widths[1]}}  {architecture:<{widths[2]}}  {state}"
        click.echo(printable(line).rstrip())


def _state(model: InstalledModel, architectures: Collection[str]) -> tuple[str, str]:
    """A model's architecture, and why it cannot be run if so."""
    from strata_core.weights.shards import open_model

    try:
        with open_model(model.path) as source:
            architecture = source.require_key("general.architecture", str)
    except StrataError as error:
        return "-", error.message
    return architecture, "" if architecture in architectures else "no installed family runs it"


@models.command()
@click.argument("name", default="default")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def pull(name: str, quiet: bool) -> None:
    """Fetch the model NAME into the models folder; nothing is fetched when it is there and intact.

    Only "default" can be fetched. Other models are GGUF files or Hugging Face folders that you put into the models
    folder yourself, name in strata.toml, or give by path.
    """
    from strata_core.weights.catalogue import DEFAULT
    from strata_core.weights.pull import pull_default

    if name != DEFAULT:
        raise NotFound(
            f"no model {name!r} to fetch; only {DEFAULT!r} is. Put other GGUF files or Hugging Face folders into "
            f"{models_dir()}, or pass their path with --model",
            param=name,
        )
    click.echo(pull_default(models_dir(), progress=not quiet))
