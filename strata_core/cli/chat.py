"""``strata chat``: talk to the model in the terminal."""

from __future__ import annotations

import click

from strata_core.cli.app import application
from strata_core.cli.options import resolve, settings_options


@settings_options
@click.command()
@click.option("--url", metavar="URL", help="Server to talk to; without it, port PORT of this machine.")
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
    from rich.console import Console

    from strata_core.cli import chat_transport as transports
    from strata_core.cli.chat_session import ChatSession

    console = Console()
    address = (url or f"http://127.0.0.1:{settings.port}").rstrip("/").removesuffix("/v1")
    remote = transports.Remote(address, next(iter(settings.api_key), None))
    if url or (not local and remote.answers()):
        remote.check()
        ChatSession(remote, console, system).run()
        return
    if not local:
        console.print(f"no server answers at {remote.url}; loading the model here", style="dim", highlight=False)
    with transports.Local(settings, application(ctx).plugins) as inside:
        ChatSession(inside, console, system).run()
