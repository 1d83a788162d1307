"""``strata models``: the installed models."""

from __future__ import annotations

import click

from strata_core.errors import NotFound
from strata_core.paths import models_dir


@click.group()
def models() -> None:
    """List and fetch models."""


@models.command("list")
def list_models() -> None:
    """List the models in the models folder."""
    from strata_core.weights.catalogue import DEFAULT, DEFAULT_FILE, installed

    found = installed()
    if not found:
        click.echo(f"no models in {models_dir()}; get the default one with: strata models pull {DEFAULT}", err=True)
    for model in found:
        remark = f"  ({DEFAULT})" if model.path.name == DEFAULT_FILE else ""
        click.echo(f"{model.name}  {model.size / 2**20:,.1f} MiB{remark}")


@models.command()
@click.argument("name", default="default")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def pull(name: str, quiet: bool) -> None:
    """Fetch the model NAME into the models folder; nothing is fetched when it is there and intact.

    Only "default" can be fetched. Other models are GGUF files that you put into the models folder yourself, or name
    with their path.
    """
    from strata_core.weights.catalogue import DEFAULT
    from strata_core.weights.pull import pull_default

    if name != DEFAULT:
        raise NotFound(
            f"no model {name!r} to fetch; only {DEFAULT!r} is. Put other GGUF files into {models_dir()}, or pass their "
            "path with --model",
            param=name,
        )
    click.echo(pull_default(models_dir(), progress=not quiet))
