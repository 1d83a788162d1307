"""What the endpoints share: the application's parts, and the current request's place in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import flask

from strata_core.errors import NotFound
from strata_core.server.collector import Latencies
from strata_core.server.holder import EngineHolder
from strata_core.server.security import Gate
from strata_core.settings import Settings, SettingsTable

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine
    from strata_core.plugins import Plugins

_KEY = "strata"


@attrs.frozen
class Parts:
    """What an application was made of.

    :ivar created: when, in seconds since 1970.
    """

    holder: EngineHolder
    settings: Settings
    table: SettingsTable
    plugins: Plugins
    gate: Gate
    latencies: Latencies
    created: int


def attach(app: flask.Flask, parts: Parts) -> None:
    """Make ``parts`` what the endpoints of ``app`` work with."""
    app.extensions[_KEY] = parts


def parts() -> Parts:
    """The parts of the application that answers the current request."""
    return cast(Parts, flask.current_app.extensions[_KEY])


def engine() -> Engine:
    """The engine, for reading.

    :raises Overloaded: it is not there (yet).
    """
    return parts().holder.engine()


def tenant() -> str:
    """Whose cache the current request shares."""
    here = parts()
    return here.gate.tenant(flask.request)


def check_model(engine: Engine, name: str | None) -> None:
    """:raises NotFound: a request names a model that is not served here.

    No name, or ``default``, means the one that is.
    """
    known = (engine.name, *engine.aliases)
    if name not in (None, "default", *known):
        raise NotFound(f"model {name!r} is not served here; this server has {', '.join(known)}", param="model")
