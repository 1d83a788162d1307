"""Settings as options of a command.

::

    @settings_options
    @click.command()
    @click.pass_context
    def serve(ctx: click.Context) -> None:
        settings = resolve(ctx)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import click
from click.core import ParameterSource

from strata_core.cli.app import application, split_repeated
from strata_core.settings import Kind, Setting, Settings
from strata_core.settings.schema import flag_of

_GIVEN = "strata.given"
_OPTIONS = "strata.options"


class SettingOption(click.Option):
    """One name of one setting. The value stays text: :mod:`strata_core.settings` parses it, for all sources alike."""

    def __init__(self, spec: Setting, name: str):
        self.spec = spec
        self.setting_name = name
        switch = spec.kind is Kind.BOOL
        flag = flag_of(name)
        kind: dict[str, Any] = {"default": None} if switch else {"metavar": spec.placeholder}
        super().__init__(
            [f"{flag}/{flag_of('no_' + name)}" if switch else flag, "setting_" + name],
            help=spec.help,
            multiple=spec.kind is Kind.LIST,
            **kind,
        )

    def raw(self, value: Any) -> object:
        return split_repeated(value) if self.spec.kind is Kind.LIST else value


class SettingsCommand(click.Command):
    """A command with an option for every setting of core and plugins, by section.

    :ivar only: names of the settings that mean something to this command; None for all.
    """

    only: Collection[str] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        # Kept in the context: another run of the same process may have other plugins.
        options: list[click.Parameter] | None = ctx.meta.get(_OPTIONS)
        if options is None:
            options = ctx.meta[_OPTIONS] = self._options(ctx)
        return [*super().get_params(ctx), *options]

    def _options(self, ctx: click.Context) -> list[click.Parameter]:
        config = click.Option(
            ["--config"], metavar="FILE", expose_value=False, help="Configuration file instead of strata.toml."
        )
        options: list[click.Parameter] = [config]
        for specs in application(ctx).plugins.settings().sections().values():
            chosen = [spec for spec in specs if self.only is None or spec.name in self.only]
            options.extend(SettingOption(spec, name) for spec in chosen for name in spec.names)
        return options

    def invoke(self, ctx: click.Context) -> Any:
        given: dict[str, object] = {}
        for option in self.get_params(ctx):
            if isinstance(option, SettingOption) and option.name is not None:
                value = ctx.params.pop(option.name, None)
                if ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
                    given[option.setting_name] = option.raw(value)
        ctx.meta[_GIVEN] = given
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(param, SettingOption):
                name, text = record
                text = f"{text}  [default: {param.spec.default_text}]"
                sections.setdefault(param.spec.section, []).append((name, text))
            else:
                sections["Options"].append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def settings_options(command: click.Command, *, only: Collection[str] | None = None) -> SettingsCommand:
    """Give ``command`` an option for every setting; its callback calls :func:`resolve`.

    :param only: names of the settings to offer, where the command would ignore all others.
    """
    made = SettingsCommand(
        command.name,
        context_settings=command.context_settings,
        callback=command.callback,
        params=command.params,
        help=command.help,
        epilog=command.epilog,
        short_help=command.short_help,
    )
    made.only = only
    return made


def resolve(ctx: click.Context) -> Settings:
    """Effective settings of this run: the command's options, environment, configuration file, defaults.

    :raises SettingsError: see :func:`strata_core.settings.resolve`.
    """
    return application(ctx).settings(ctx.meta.get(_GIVEN, {}))
