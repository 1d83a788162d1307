"""The plugins of a run, and the only caller of their hooks.

Loading and calling are isolated plugin by plugin: one that cannot be imported, does not fit the hook specifications or
raises is marked *failed*, with the reason, and left out from then on; nobody else notices. Only what the user asked
for by name (``--plugins``, ``STRATA_PLUGINS``, ``--backend NAME``) and the built-in plugins are worth an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from strata_core import hookspecs
from strata_core.errors import PluginError
from strata_core.plugin_records import (
    ItemBuilder,
    Plugin,
    Registered,
    Status,
    TableBuilder,
    builtin_record,
    import_requested,
    reason_of,
    split_names,
)
from strata_core.settings.core import CORE
from strata_core.settings.kinds import near
from strata_core.settings.resolve import OFF
from strata_core.settings.schema import SettingsTable

if TYPE_CHECKING:
    import click
    import flask

    from strata_core.compute.base import BackendFactory, Probe
    from strata_core.conversations.placement import Placement, Verdict
    from strata_core.events import Event
    from strata_core.memory.base import MemoryProvider
    from strata_core.models.base import Family
    from strata_core.store.base import LevelFactory

log = logging.getLogger("strata.plugins")

DEFAULT_PLUGINS = (
    "strata_core.memory.plugin",
    "strata_core.compute.plugin",
    "strata_core.models.plugin",
    "strata_core.store.plugin",
    "strata_core.conversations.plugin",
    "strata_core.cli.plugin",
)
"""Modules of the built-in plugins. Each is named after its room: ``strata_core.memory.plugin`` is ``memory``.

They import what they register inside their hook functions, so that ``strata --help`` does not load numpy.
"""


@attrs.frozen
class PluginInfo:
    """One line of ``strata plugins``.

    :ivar distribution: :ivar version: of the installed package it comes from; None for a module given by name.
    :ivar error: why it failed, or why blocking it had no effect; None otherwise.
    :ivar hooks: names of the hooks it implements.
    """

    name: str
    distribution: str | None
    version: str | None
    status: Status
    error: str | None
    hooks: tuple[str, ...]


@attrs.frozen
class BackendStatus:
    """What is known of one registered backend after its probe."""

    name: str
    plugin: str
    priority: int
    usable: bool
    detail: str


class Plugins:
    """See the module's docstring; made by :meth:`load`. Any thread may call; hooks run on the caller's thread."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins: list[Plugin] = []
        self._registered: dict[str, dict[str, Registered]] = {}
        self._callers: dict[str, tuple[tuple[Plugin, Callable[..., Any]], ...]] = {}
        self._table: SettingsTable | None = None
        self._lock = threading.RLock()

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] = os.environ,
        requested: Sequence[str] | None = None,
        blocked: Sequence[str] | None = None,
        *,
        builtin: Sequence[str] = DEFAULT_PLUGINS,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    ) -> Plugins:
        """Load built-in plugins, installed ones (entry-point group ``strata``) and modules that were asked for.

        :param requested: names of entry points or modules that must load; None takes ``STRATA_PLUGINS``.
        :param blocked: names not to load; None takes ``STRATA_DISABLE_PLUGINS``.
        :param entry_points: the installed plugins; None asks the interpreter.
        :raises PluginError: a built-in or requested plugin is blocked, missing or failed.
        """
        wanted = split_names(environ.get("STRATA_PLUGINS", "")) if requested is None else tuple(requested)
        banned = split_names(environ.get("STRATA_DISABLE_PLUGINS", "")) if blocked is None else tuple(blocked)
        for name in wanted:
            if name in banned:
                raise PluginError(f"plugin {name!r} is both asked for and disabled", param=name)
        self = cls()
        if environ.get("STRATA_TRACE_HOOKS", "").lower() not in OFF:
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()
        for module in builtin:
            self._add(builtin_record(module), partial(importlib.import_module, module), banned)
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=hookspecs.PROJECT)
        points = list(entry_points)
        for point in points:
            package, version = (point.dist.name, point.dist.version) if point.dist else (None, None)
            required = point.name in wanted or point.value in wanted
            self._add(Plugin(point.name, package, version, required), point.load, banned)
        known = {plugin.name for plugin in self._plugins}
        values = {point.value for point in points}
        for name in (name for name in dict.fromkeys(wanted) if name not in known | values):
            self._add(Plugin(name, None, None, required=True), partial(import_requested, name), banned)
        for name in (name for name in dict.fromkeys(banned) if name not in known):
            error = "no plugin of this name is installed"
            self._plugins.append(Plugin(name, None, None, required=False, status="blocked", error=error))
        return self

    def _add(self, plugin: Plugin, load: Callable[[], Any], banned: Sequence[str]) -> None:
        twin = next((other for other in self._plugins if other.name == plugin.name), None)
        self._plugins.append(plugin)
        if plugin.name in banned:
            plugin.status = "blocked"
            return
        try:
            if twin is not None:
                raise PluginError(f"plugin {plugin} has the name of another one, {twin}")
            plugin.implementation = load()
            self._manager.register(plugin.implementation, plugin.name)
            self._manager.check_pending()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign module does on import
            self._fail(plugin, error, fatal=True)
            return
        plugin.hooks = tuple(sorted(hook.name for hook in self._manager.get_hookcallers(plugin.implementation) or ()))

    # -- what is registered -------------------------------------------------------------------------------------

    def settings(self) -> SettingsTable:
        """The settings of the core and of all active plugins."""
        with self._lock:
            if self._table is None:
                table = CORE
                for plugin, call in self._calls("strata_register_settings"):
                    found = TableBuilder(plugin.name, table)
                    if self._attempt(plugin, call, register=found.register):
                        table = found.table
                self._table = table
            return self._table

    def backends(self) -> dict[str, BackendFactory]:
        """Registered backends by name."""
        return self._items("strata_register_backends", "backend")

    def levels(self) -> dict[str, LevelFactory]:
        """Registered levels by name, highest (least rank) first."""
        found: dict[str, LevelFactory] = self._items("strata_register_levels", "level")
        return dict(sorted(found.items(), key=lambda item: item[1].rank))

    def families(self) -> dict[str, Family]:
        """Registered model families by name."""
        return self._items("strata_register_families", "model family")

    def memory(self) -> dict[str, MemoryProvider]:
        """Registered memory providers by name, the one to use first."""
        found: dict[str, MemoryProvider] = self._items("strata_register_memory", "memory provider")
        return dict(sorted(found.items(), key=lambda item: -item[1].priority))

    def choose_memory(self) -> MemoryProvider:
        """The memory provider of highest priority.

        :raises PluginError: none is registered (the built-in one is disabled).
        """
        for provider in self.memory().values():
            return provider
        raise PluginError("no active plugin provides memory; the built-in one is called 'memory'")

    def probe_backends(self) -> Iterator[BackendStatus]:
        """Probe the registered backends one after the other, highest priority first.

        A probe that raises is its plugin's failure.
        """
        factories = self.backends()
        for name in sorted(factories, key=lambda name: -factories[name].priority):
            registered = self._registered["strata_register_backends"].get(name)
            if registered is None:  # its plugin failed meanwhile
                continue
            probe = self._probe(registered)
            yield BackendStatus(name, registered.plugin.name, factories[name].priority, probe.usable, probe.detail)

    def choose_backend(self, name: str = "auto") -> BackendFactory:
        """The backend called ``name``, or with ``auto`` the usable one of highest priority.

        :raises PluginError: it does not exist or cannot be used here, and why; with ``auto`` why none can.
        """
        factories = self.backends()
        if name == "auto":
            refused = []
            for status in self.probe_backends():
                if status.usable:
                    return factories[status.name]
                refused.append(f"{status.name}: {status.detail}")
            raise PluginError(f"no backend can be used here ({'; '.join(refused) or 'none is registered'})")
        if name not in factories:
            failed = [f"{p.name} ({p.error})" for p in self._plugins if p.status == "failed"]
            also = f". Plugins that failed: {'; '.join(failed)}" if failed else ""
            there = ", ".join(factories) or "none"
            raise PluginError(f"there is no backend {name!r}{near(name, factories)}; there are: {there}{also}")
        probe = self._probe(self._registered["strata_register_backends"][name])
        if not probe.usable:
            raise PluginError(f"backend {name!r} cannot be used here: {probe.detail}", param="backend")
        return factories[name]

    def _probe(self, registered: Registered) -> Probe:
        from strata_core.compute.base import Probe

        try:
            found = registered.item.probe()
            if not isinstance(found, Probe):
                raise TypeError(f"probe() returned {found!r}")
        except Exception as error:  # noqa: BLE001 - a foreign probe
            self._fail(registered.plugin, error, fatal=False)
            return Probe(False, f"its probe failed: {reason_of(error)}")
        return found

    def _items(self, hook: str, noun: str) -> dict[str, Any]:
        with self._lock:
            if hook not in self._registered:
                taken: dict[str, Registered] = {}
                for plugin, call in self._calls(hook):
                    found = ItemBuilder(plugin, noun, taken)
                    if self._attempt(plugin, call, register=found.register):
                        taken.update(found.items)
                self._registered[hook] = taken
            return {name: registered.item for name, registered in self._registered[hook].items()}

    # -- calls --------------------------------------------------------------------------------------------------

    def commands(self, cli: click.Group) -> None:
        """Let plugins add their commands to the root group."""
        for plugin, call in self._calls("strata_register_commands"):
            self._attempt(plugin, call, cli=cli)

    def routes(self, app: flask.Flask) -> None:
        """Let plugins add their routes to the server."""
        for plugin, call in self._calls("strata_register_routes"):
            self._attempt(plugin, call, app=app)

    def admit(self, placement: Placement) -> Verdict:
        """The first answer to a placement. A plugin that raises is left out and the next one asked.

        :raises PluginError: nobody answers (the built-in rule is disabled and no other replaces it).
        """
        for plugin, call in self._calls("strata_admit"):
            try:
                verdict: Verdict | None = call(placement=placement)
            except Exception as error:  # noqa: BLE001 - a foreign rule must not end a request
                self._fail(plugin, error, fatal=False)
                continue
            if verdict is not None:
                return verdict
        raise PluginError("no active plugin decides placements; the built-in rule is called 'conversations'")

    def observe(self, event: Event) -> None:
        """Tell all observers. Never raises."""
        for plugin, call in self._calls("strata_observe"):
            try:
                call(event=event)
            except Exception as error:  # noqa: BLE001 - a foreign observer must not end the dispatcher
                self._fail(plugin, error, fatal=False)

    def listing(self) -> list[PluginInfo]:
        """All plugins that are known, also those that failed or are blocked, in the order of loading."""
        return [PluginInfo(p.name, p.distribution, p.version, p.status, p.error, p.hooks) for p in self._plugins]

    def _calls(self, hook: str) -> tuple[tuple[Plugin, Callable[..., Any]], ...]:
        """Active plugins that implement ``hook``, in pluggy's call order, each with a caller of its own.

        Registration hooks run in the order of loading instead, so that a taken name is the later plugin's error.
        """
        found = self._callers.get(hook)
        if found is None:
            with self._lock:
                active = {id(p.implementation): p for p in self._plugins if p.status == "active"}
                implementations = reversed(getattr(self._manager.hook, hook).get_hookimpls())
                called = list(dict.fromkeys(active[id(impl.plugin)] for impl in implementations))
                if "_register_" in hook:
                    called.sort(key=self._plugins.index)
                found = self._callers[hook] = tuple((plugin, self._caller(hook, plugin)) for plugin in called)
        return found

    def _caller(self, hook: str, plugin: Plugin) -> Callable[..., Any]:
        others = [p.implementation for p in self._plugins if p.status == "active" and p is not plugin]
        return self._manager.subset_hook_caller(hook, others)

    def _attempt(self, plugin: Plugin, call: Callable[..., Any], **arguments: Any) -> bool:
        try:
            call(**arguments)
        except Exception as error:  # noqa: BLE001 - a foreign implementation
            self._fail(plugin, error, fatal=True)
            return False
        return True

    def _fail(self, plugin: Plugin, error: BaseException, *, fatal: bool) -> None:
        """Leave a plugin out from now on. Raises if it is required and the run has not got going (``fatal``)."""
        reason = reason_of(error)
        raises = fatal and plugin.required
        with self._lock:
            if plugin.status == "active":
                plugin.status, plugin.error = "failed", reason
                if self._manager.get_name(plugin.implementation) == plugin.name:
                    self._manager.unregister(plugin.implementation)
                self._callers.clear()
                for items in self._registered.values():
                    for name in [name for name, registered in items.items() if registered.plugin is plugin]:
                        del items[name]
                if not raises:
                    log.warning("plugin %s failed and is left out: %s", plugin, reason)
                log.debug("plugin %s failed", plugin, exc_info=error)
        if raises:
            raise PluginError(f"plugin {plugin.name!r} failed: {reason}", param=plugin.name) from error
