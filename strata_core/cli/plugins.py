"""``strata plugins``."""

from __future__ import annotations

import json

import attrs
import click

from strata_core.cli.app import application
from strata_core.cli.tables import print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List plugins and backends, and why some are not used.

    Everything is registered and every backend probed, as a server that starts would do it.
    """
    manager = application(ctx).plugins
    manager.settings(), manager.memory(), manager.levels(), manager.families()
    backends = list(manager.probe_backends())
    listing = manager.listing()
    if as_json:
        data = {"plugins": [attrs.asdict(p) for p in listing], "backends": [attrs.asdict(b) for b in backends]}
        click.echo(json.dumps(data, indent=2))
        return
    print_table(
        ("PLUGIN", "VERSION", "STATUS", "HOOKS", "REASON"),
        [
            (
                p.name,
                f"{p.distribution} {p.version}" if p.distribution else "",
                p.status,
                ", ".join(hook.removeprefix("strata_") for hook in p.hooks),
                p.error or "",
            )
            for p in listing
        ],
    )
    click.echo()
    print_table(
        ("BACKEND", "PLUGIN", "PRIORITY", "USABLE", "DETAIL"),
        [(b.name, b.plugin, str(b.priority), "yes" if b.usable else "no", b.detail) for b in backends],
    )
