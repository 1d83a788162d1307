"""Declaring settings: one line in a frozen attrs class is the whole declaration.

From it come the command-line flag, the environment variable, the ``strata.toml`` key, the validation, the help and
``docs/options.md``::

    @attrs.frozen(kw_only=True)
    class TierSettings:
        warm_mib: int = setting(0, kind=Kind.SIZE, section="Levels", help="RAM budget of ...", minimum=0)

declares ``--warm-mib``, ``STRATA_WARM_MIB`` and ``warm_mib``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from strata_core.errors import PluginError, SettingsError
from strata_core.settings.kinds import Kind, check, format_value

T = TypeVar("T")
_METADATA = "strata-setting"
ENV_PREFIX = "STRATA_"


@attrs.frozen(kw_only=True)
class Setting:
    """Everything that is known about one setting.

    :ivar name: attribute of the settings class; the other names derive from it.
    :ivar default: value when no source gives one, in Python's type.
    :ivar section: heading in help and documentation.
    :ivar aliases: further names of the same setting, each with flag, variable and key.
    :ivar minimum: least and :ivar maximum: greatest value, both included.
    :ivar unit: for sizes: the unit that a plain number counts and that the value is held in.
    :ivar auto: the word ``auto`` is accepted and gives None.
    :ivar secret: never shown.
    :ivar env_switches: further environment variables that, when on, mean the value they map to.
    """

    kind: Kind
    default: Any
    help: str
    section: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    metavar: str = ""
    unit: str = "MiB"
    auto: bool = False
    secret: bool = False
    env_switches: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def env(self) -> str:
        return env_of(self.name)

    @property
    def placeholder(self) -> str:
        """What stands for the value in help: the choices, the metavar or the kind's word."""
        if self.choices:
            return "|".join(str(choice) for choice in self.choices)
        word = self.metavar or (self.unit if self.kind is Kind.SIZE else self.kind.value)
        return f"auto|{word}" if self.auto else word

    @property
    def default_text(self) -> str:
        """The default as text, ``none`` where there is none."""
        return format_value(self, self.default) or "none"


def flag_of(name: str) -> str:
    """Command-line flag of a setting's name."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """Environment variable of a setting's name."""
    return ENV_PREFIX + name.upper()


def setting(
    default: T,
    *,
    help: str,
    section: str,
    kind: Kind | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str = "",
    unit: str = "MiB",
    auto: bool = False,
    secret: bool = False,
    env_switches: Mapping[str, str] | None = None,
) -> T:
    """Declare a field of a settings class; the parameters are :class:`Setting`'s.

    The kind follows from the default's type (bool, int, float, str, tuple of str) unless given; sizes, paths and
    pairs are always given.
    """
    spec = Setting(
        kind=kind or _KIND_OF_TYPE[type(default)],
        default=default,
        help=help,
        section=section,
        aliases=aliases,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        metavar=metavar,
        unit=unit,
        auto=auto,
        secret=secret,
        env_switches=dict(env_switches or {}),
    )
    field: T = attrs.field(default=default, repr=not secret, validator=_validate, metadata={_METADATA: spec})
    return field


_KIND_OF_TYPE = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT, tuple: Kind.LIST, Path: Kind.PATH}


def _validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    try:
        check(attribute.metadata[_METADATA], value)
    except ValueError as error:
        raise SettingsError(f"{attribute.name}: {error}", param=attribute.name) from None


def settings_of(cls: type[Any]) -> tuple[Setting, ...]:
    """The settings that a class declares, in order; fields that are no settings are left out."""
    return tuple(
        attrs.evolve(field.metadata[_METADATA], name=field.name)
        for field in attrs.fields(cls)
        if _METADATA in field.metadata
    )


@attrs.frozen
class SettingsTable:
    """All settings of a run: the core's class and the ones that plugins registered.

    :ivar classes: (owner, class) pairs; the core's class is first.
    """

    classes: tuple[tuple[str, type[Any]], ...]

    def __iter__(self) -> Iterator[Setting]:
        for _, cls in self.classes:
            yield from settings_of(cls)

    def names(self) -> dict[str, Setting]:
        """Every name and alias with its setting."""
        return {name: spec for spec in self for name in spec.names}

    def sections(self) -> dict[str, list[Setting]]:
        """Settings by section, sections in the order of first use."""
        found: dict[str, list[Setting]] = {}
        for spec in self:
            found.setdefault(spec.section, []).append(spec)
        return found

    def extend(self, owner: str, cls: type[Any]) -> SettingsTable:
        """A table that also has the settings of ``cls``, which the plugin ``owner`` registered.

        :raises PluginError: ``cls`` declares no settings, or a name or alias that is taken; both owners are named.
        """
        added = settings_of(cls) if attrs.has(cls) else ()
        if not added:
            raise PluginError(f"plugin {owner!r} registered {cls!r}, which declares no settings")
        taken = {name: known for known, other in self.classes for spec in settings_of(other) for name in spec.names}
        for spec in added:
            for name in spec.names:
                if name in taken:
                    raise PluginError(
                        f"setting {name!r} of plugin {owner!r} is already declared by {taken[name]!r}", param=name
                    )
                taken[name] = owner
        return SettingsTable((*self.classes, (owner, cls)))
