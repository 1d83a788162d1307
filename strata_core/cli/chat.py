"""``strata chat``: talk to the model in the terminal."""

from __future__ import annotations

import click

from strata_core.cli.app import application
from strata_core.cli.client import CLIENT, server_address, server_key
from strata_core.cli.options import resolve, settings_options
from strata_core.logs import log_to_stderr
from strata_core.settings import Settings
from strata_core.settings.schema import flag_of

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
"""Settings that are also fields of a request."""


@settings_options
@click.command()
@click.option("--url", metavar="URL", help="Server to talk to; without it, the one at HOST and PORT.")
@click.option("--local", is_flag=True, help="Load the model in this process instead of asking a server.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.pass_context
def chat(ctx: click.Context, url: str | None, local: bool, system: str | None) -> None:
    """Talk to the model in the terminal.

    Asks a running server; where none answers (and no URL was given), the model is loaded in this process. /reset
    begins a new conversation, /exit leaves, Ctrl+C stops a reply.
    """
    if url and local:
        raise click.UsageError("--url and --local exclude each other")
    settings = resolve(ctx)
    # Sampling that the user chose goes with each request; the rest of the settings is the server's business.
    chosen = {name: getattr(settings, name) for name in SAMPLING if name in settings.sources}
    # The settings' words for "no limit" and "a new one each time" are no values of these fields.
    fields = {name: value for name, value in chosen.items() if (name, value) not in (("max_tokens", 0), ("seed", -1))}
    from rich.console import Console

    from strata_core.cli import chat_transport as transports
    from strata_core.cli.chat_session import ChatSession

    console = Console()
    remote = transports.Remote(server_address(url, settings), server_key(settings))
    if url or (not local and remote.answers()):
        _refuse_without_effect(settings, remote.url)
        remote.check()
        ChatSession(remote, console, system, fields).run()
        return
    if not local:
        console.print(f"no server answers at {remote.url}; loading the model here", style="dim", highlight=False)
    if "log_level" in settings.sources:  # else the engine's lines would stand between those of the conversation
        log_to_stderr(settings.log_level)
    with transports.Local(settings, application(ctx).plugins) as inside:
        ChatSession(inside, console, system, fields).run()


def _refuse_without_effect(settings: Settings, url: str) -> None:
    """:raises UsageError: the command line has settings that a running server cannot take over."""
    given = [name for name, source in settings.sources.items() if source.startswith("command line")]
    lost = [flag_of(name) for name in given if name not in (*SAMPLING, *CLIENT)]
    if lost:
        raise click.UsageError(f"{', '.join(lost)} cannot change the server at {url}; add --local to load a model here")
