"""``strata settings``."""

from __future__ import annotations

import json

import click

from strata_core.cli.app import application
from strata_core.cli.options import resolve, settings_options
from strata_core.cli.tables import print_table
from strata_core.settings import Setting, Settings, settings_of
from strata_core.settings.kinds import format_value


@settings_options
@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def settings(ctx: click.Context, as_json: bool) -> None:
    """Show the effective settings and where each comes from.

    Takes the options of `strata serve`, and shows what that command would use.
    """
    effective = resolve(ctx)
    rows: list[tuple[str, str, str]] = []
    for _, cls in application(ctx).plugins.settings().classes:
        values = effective if cls is Settings else effective.plugin(cls)
        for spec in settings_of(cls):
            shown = _shown(spec, getattr(values, spec.name))
            rows.append((spec.name, shown, effective.sources.get(spec.name, "default")))
    if as_json:
        click.echo(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
    else:
        print_table(("SETTING", "VALUE", "FROM"), rows)


def _shown(spec: Setting, value: object) -> str:
    if spec.secret and value:
        return "(hidden)"
    return format_value(spec, value)
