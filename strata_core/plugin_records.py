"""What :class:`strata_core.plugins.Plugins` keeps of each plugin, and the ``register`` callbacks it hands out."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from strata_core import __version__
from strata_core.errors import PluginError, StrataError
from strata_core.settings.schema import SettingsTable

DISTRIBUTION = "strata-engine"

Status = Literal["active", "failed", "blocked"]


@attrs.define(eq=False)
class Plugin:
    """A plugin's record. ``required``: its failure is an error of the run."""

    name: str
    distribution: str | None
    version: str | None
    required: bool
    status: Status = "active"
    error: str | None = None
    hooks: tuple[str, ...] = ()
    implementation: Any = None

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)


@attrs.frozen
class Registered:
    plugin: Plugin
    item: Any


@attrs.define
class ItemBuilder:
    """Collects what one plugin registers in one hook call; it is taken over only if the call succeeds.

    :ivar taken: what plugins before it registered.
    """

    plugin: Plugin
    noun: str
    taken: dict[str, Registered]
    items: dict[str, Registered] = attrs.field(factory=dict)

    def register(self, item: Any) -> None:
        """The ``register`` of the hook.

        :raises PluginError: a name of the item is taken; both plugins are named.
        """
        claims = dict(claim for known in (self.taken, self.items) for claim in _claims(known))
        for what in _names_of(item):
            if what in claims:
                raise PluginError(
                    f"{self.noun} {what!r} of plugin {self.plugin} is already registered by plugin {claims[what]}"
                )
        self.items[item.name] = Registered(self.plugin, item)


def _claims(known: dict[str, Registered]) -> Iterator[tuple[str, Plugin]]:
    for registered in known.values():
        for what in _names_of(registered.item):
            yield what, registered.plugin


def _names_of(item: Any) -> tuple[str, ...]:
    """What must be unique: the name and, for model families, each architecture."""
    return (item.name, *(f"architecture {name}" for name in getattr(item, "architectures", ())))


@attrs.define
class TableBuilder:
    """Collects the settings classes of one plugin, see :class:`ItemBuilder`."""

    owner: str
    table: SettingsTable

    def register(self, cls: type[Any]) -> None:
        self.table = self.table.extend(self.owner, cls)


def builtin_record(module: str) -> Plugin:
    """Record of a built-in plugin, named after its room."""
    return Plugin(module.split(".")[-2], DISTRIBUTION, __version__, required=True)


def import_requested(name: str) -> Any:
    """Import a plugin module that the user named.

    :raises PluginError: there is none of this name (as opposed to one that fails while it is imported).
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise PluginError("there is no installed plugin and no module of this name") from None
        raise


def split_names(text: str) -> tuple[str, ...]:
    """Names of a comma-separated variable."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def reason_of(error: BaseException) -> str:
    """One line that says what happened, for listings and logs."""
    if isinstance(error, StrataError):
        return error.message
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
