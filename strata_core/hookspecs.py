"""The hooks through which everything exchangeable enters Strata.

Pluggy project name and entry-point group: ``strata``. A plugin is a module (or object) with functions that carry
:data:`hookimpl` and the names below; an implementation may leave out parameters it does not need. The built-in features
are plugins of the same kind (:data:`strata_core.plugins.DEFAULT_PLUGINS`).

Rules that hold for every hook:

* Hooks choose objects, the objects do the work: no hook is called per token, per page or per layer.
* Only :class:`strata_core.plugins.Plugins` calls hooks, and it calls each plugin's implementation on its own. An
  exception is logged and held against that plugin, which is then *failed*: it is not called again and what it had
  passed to ``register`` is forgotten. Other plugins are not affected. If the user asked for the plugin by name, an
  error while it loads or registers ends the run with :class:`strata_core.errors.PluginError`.
* What is passed to ``register`` has a name; a name that another plugin has taken is an error of the second plugin.
* Vendor libraries are imported inside the factories and probes that need them, never at the top of a plugin module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click
    import flask

    from strata_core.compute.base import BackendFactory
    from strata_core.conversations.placement import Placement, Verdict
    from strata_core.events import Event
    from strata_core.memory.base import MemoryProvider
    from strata_core.models.base import Family
    from strata_core.store.base import LevelFactory

PROJECT = "strata"
"""Pluggy project name and entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as implementation of the hook whose name it has."""


@hookspec
def strata_register_settings(register: Callable[[type[Any]], None]) -> None:
    """Register the plugin's own settings.

    Called once, before the command line is parsed and before any other registration hook of the same run needs a
    value. Plugins may implement this to get command-line options, ``strata.toml`` keys and environment variables of
    their own; all three share one namespace with the core's.

    :param register: takes one frozen attrs class whose fields are declared with
        :func:`strata_core.settings.setting`. Its resolved instance is ``settings.plugin(ThatClass)``. May be called
        several times. Raises :class:`strata_core.errors.PluginError` for a name or alias that is already taken,
        naming both owners.
    """


@hookspec
def strata_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register compute backends.

    Called once, when a backend is first listed or chosen. Plugins may implement this to offer a device. With
    ``--backend auto`` the usable backend of highest priority is taken (built-in reference 0, CPU kernels 10, GPUs 20).

    :param register: takes one :class:`strata_core.compute.base.BackendFactory`. Its ``probe()`` must not raise when
        the device or its libraries are absent: it returns ``Probe(usable=False, detail=why)``.
    """


@hookspec
def strata_register_levels(register: Callable[[LevelFactory], None]) -> None:
    """Register storage levels for conversations.

    Called once, when the engine builds its levels. Plugins may implement this to offer a place below RAM. Levels are
    ordered by rank (RAM 0, warm 10, cold 20, shared 30); a victim of one level is offered to the next.

    :param register: takes one :class:`strata_core.store.base.LevelFactory`. Its ``create(context)`` returns None when
        the settings do not configure this level.
    """


@hookspec(firstresult=True)
def strata_admit(placement: Placement) -> Verdict | None:
    """Decide whether a placement may take the memory it needs.

    Called by the engine thread once per placement (park, hit on a lower level, streamed restore, session save) before
    anything is allocated; it must return at once and must not block. Stops at the first result that is not None.
    Plugins may implement this to refuse or to redirect placements. The built-in rule (parking floor, transient floor)
    is ``trylast`` and always answers.

    :param placement: what is asked for: need, available bytes, floors and target. Immutable.
    :returns: the decision, or None to leave it to the next plugin.
    """


@hookspec
def strata_register_memory(register: Callable[[MemoryProvider], None]) -> None:
    """Register memory probes and arena allocators.

    Called once, before pool and weights are allocated. Plugins may implement this to measure or allocate host memory
    in their platform's way. The provider of highest priority is used; a plugin registers only where its provider
    works.

    :param register: takes one :class:`strata_core.memory.base.MemoryProvider`.
    """


@hookspec
def strata_register_families(register: Callable[[Family], None]) -> None:
    """Register model families.

    Called once, when a model is first opened. Plugins may implement this to run further architectures.

    :param register: takes one :class:`strata_core.models.base.Family`, which names the architectures it loads. Two
        families for one architecture are an error of the second.
    """


@hookspec
def strata_register_commands(cli: click.Group) -> None:
    """Add commands to ``strata``.

    Called once per run of the command line, before the command is looked up. Plugins may implement this to add
    commands or groups with ``@cli.command()``, ``cli.add_command(command)`` or, to keep ``strata --help`` fast,
    ``cli.add_lazy(name, "package.module:attribute", short_help)``.

    :param cli: the root group. Adding a name that exists raises :class:`strata_core.errors.PluginError`.
    """


@hookspec
def strata_register_routes(app: flask.Flask) -> None:
    """Add HTTP routes to the server.

    Called once, after the built-in routes are registered and before the first request. Plugins may implement this to
    register Flask blueprints. API keys, host and origin rules and the body limit apply to plugin routes too.

    :param app: the Flask application.
    """


@hookspec
def strata_observe(event: Event) -> None:
    """See that something happened.

    Called by the event dispatcher's thread, in order, after the fact; never on the per-token path. Plugins may
    implement this for metrics, traces and logs. A slow observer delays other observers, not requests; when too many
    events wait, the newest are dropped and counted.

    :param event: one of the classes in :mod:`strata_core.events`. Immutable. New classes may be added, so ignore the
        ones you do not know.
    """
