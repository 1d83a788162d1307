"""Built-in plugin: Strata's own commands, by reference so that each is imported only when invoked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.cli.lazy import LazyGroup

_COMMANDS = (
    ("chat", "Talk to the model in the terminal."),
    ("inspect", "Show what a model file contains and what is unsupported."),
    ("models", "List and pull models."),
    ("plugins", "List plugins and backends, and why some are not used."),
    ("serve", "Serve a model over HTTP."),
    ("simulate", "Replay a trace of requests against other budgets, without a model."),
    ("settings", "Show the effective settings and where each comes from."),
    ("why", "Show where a request's tokens came from, and what was read again and why."),
)


@hookimpl
def strata_register_commands(cli: LazyGroup) -> None:
    for name, short_help in _COMMANDS:
        cli.add_lazy(name, f"strata_core.cli.{name}:{name}", short_help)
