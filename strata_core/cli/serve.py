"""``strata serve``: the HTTP server."""

from __future__ import annotations

import sys

import click

from strata_core.cli.app import application
from strata_core.cli.options import resolve, settings_options


@settings_options
@click.command()
@click.pass_context
def serve(ctx: click.Context) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Stops on Ctrl+C or SIGTERM: running requests may finish, new ones are refused meanwhile.
    """
    settings = resolve(ctx)
    plugins = application(ctx).plugins
    # Imported here so that `strata serve --help` does not load numpy and Flask.
    from strata_core.logs import log_to_stderr
    from strata_core.server.preflight import check
    from strata_core.server.runner import serve as run

    log_to_stderr(settings.log_level)
    check(settings, plugins)
    sys.exit(run(settings, plugins))
