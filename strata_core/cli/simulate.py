"""``strata simulate``: what a trace of requests would have come to with other budgets, floors and levels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from strata_core.cli.tables import print_table
from strata_core.errors import NotFound, SettingsError, StrataError
from strata_core.simulate.changes import FIELDS, parse_changes, parse_rates
from strata_core.simulate.config import Changes, SimConfig
from strata_core.simulate.generate import Agents, agents_trace

if TYPE_CHECKING:
    from strata_core.simulate.outcome import Outcome
    from strata_core.simulate.trace import Trace


def _change_options(command: Callable[..., None]) -> Callable[..., None]:
    for field in reversed(FIELDS):
        command = click.option(
            f"--{field.flag}", field.name, type=field.type, metavar=field.metavar, help=field.help
        )(command)
    return command


def _shape_options(command: Callable[..., None]) -> Callable[..., None]:
    for field in reversed(attrs.fields(Agents)):
        if field.name == "parallel":
            continue  # is an option of the replay, too
        kind = float if isinstance(field.default, float) else int
        command = click.option(
            f"--{field.name.replace('_', '-')}", f"shape_{field.name}", type=kind,
            help=f"With --generate; default {field.default}.",
        )(command)  # fmt: skip
    return command


@click.command()
@click.argument("trace", metavar="[TRACE]", required=False)
@click.option("--run", "run_number", type=int, metavar="N", help="Run of the trace to replay; default the last.")
@click.option("--until", type=float, metavar="S", help="Stop after S simulated seconds.")
@_change_options
@click.option(
    "--compare", multiple=True, metavar="NAME:key=value,...",
    help="Replay also with these options instead; repeatable. Keys are the options above, without dashes in front.",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the plot to an SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of table and plot.")
@click.option("--generate", type=click.Choice(["agents"]), help="Print a made-up trace instead: agents taking turns.")
@_shape_options
def simulate(
    trace: str | None,
    run_number: int | None,
    until: float | None,
    compare: Sequence[str],
    plot: Path | None,
    as_json: bool,
    generate: str | None,
    **values: Any,
) -> None:
    """Replay TRACE without a model, with the engine's own decisions.

    TRACE is a file written by `strata serve --record-trace`, or by --generate; `-` reads it from standard input.
    Options change what the trace was recorded under.
    """
    shape = {name.removeprefix("shape_"): values.pop(name) for name in list(values) if name.startswith("shape_")}
    given = {name: value for name, value in shape.items() if value is not None}
    if generate:
        if trace:
            raise click.UsageError("--generate makes a trace; it takes none")
        if values["parallel"] is not None:
            given["parallel"] = values["parallel"]
        for line in agents_trace(Agents(**given)):
            click.echo(line)
        return
    if given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} goes with --generate")
    if not trace:
        raise click.UsageError("which TRACE? Or --generate agents")
    loaded = _load(trace, run_number)
    base = _changes(values).apply(SimConfig.of_trace(loaded))
    configs = [base]
    for text in compare:
        configs.append(parse_changes(text).apply(base))
    _show([_replay(loaded, config, until) for config in configs], plot, as_json)


def _changes(values: dict[str, Any]) -> Changes:
    label = "these options" if any(value is not None for value in values.values()) else None
    rates = {name: parse_rates(values[name] or "") for name in ("restore_rate", "write_rate")}
    return Changes(label=label, **(values | rates))


def _load(trace: str, run_number: int | None) -> Trace:
    from strata_core.simulate.trace import read_trace

    if trace == "-":
        return read_trace(sys.stdin, run_number)
    try:
        with Path(trace).open(encoding="ascii") as lines:
            return read_trace(lines, run_number)
    except UnicodeDecodeError:
        raise SettingsError(f"{trace} is no trace: it is not plain text") from None
    except FileNotFoundError:
        raise NotFound(f"there is no file {trace}") from None
    except OSError as error:
        raise SettingsError(f"{trace}: {error.strerror or error}") from None


def _replay(trace: Trace, config: SimConfig, until: float | None) -> Outcome:
    from rich.console import Console
    from rich.progress import Progress

    from strata_core.simulate.replay import Replay

    with Progress(console=Console(stderr=True), transient=True) as display:
        bar = display.add_task(config.label, total=1.0)
        replay = Replay(trace, config, lambda fraction: display.update(bar, completed=fraction))
        return replay.run(float("inf") if until is None else until)


def _show(outcomes: Sequence[Outcome], plot: Path | None, as_json: bool) -> None:
    from strata_core.simulate.report import svg_plot, table, text_plot

    if plot is not None:
        try:
            plot.write_text(svg_plot(outcomes), encoding="utf-8")
        except OSError as error:
            raise StrataError(f"{plot}: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps([outcome.as_json() for outcome in outcomes], indent=2))
        return
    print_table(*table(outcomes))
    click.echo()
    for line in text_plot(outcomes):
        click.echo(line)
