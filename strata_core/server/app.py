"""The Flask application: the built-in routes, then those of plugins, behind one gate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import flask

from strata_core.server import (
    common,
    control,
    errors,
    extensions,
    health,
    metrics,
    models,
    openai_chat,
    openai_completions,
    props,
    security,
    sessions,
    tokens,
)
from strata_core.server.holder import EngineHolder
from strata_core.settings import Settings

if TYPE_CHECKING:
    from strata_core.plugins import Plugins

BLUEPRINTS = (
    health.blueprint,
    models.blueprint,
    openai_chat.blueprint,
    openai_completions.blueprint,
    tokens.blueprint,
    props.blueprint,
    control.blueprint,
    sessions.blueprint,
    extensions.blueprint,
)


def create_app(holder: EngineHolder, settings: Settings, plugins: Plugins) -> flask.Flask:
    """The WSGI application that serves the engine in ``holder``, which may still be loading.

    :raises SettingsError: the API keys cannot be read.
    :raises PluginError: a plugin that was asked for by name failed to add its routes.
    """
    app = flask.Flask("strata", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_mib << 20
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.json.ensure_ascii = False  # type: ignore[attr-defined]
    registry, latencies = metrics.new_registry(holder)
    gate = security.Gate.from_settings(settings)
    common.attach(
        app,
        common.Parts(
            holder=holder,
            settings=settings,
            table=plugins.settings(),
            plugins=plugins,
            gate=gate,
            latencies=latencies,
            created=int(time.time()),
        ),
    )
    errors.install(app)
    security.install(app, gate)
    for blueprint in (*BLUEPRINTS, metrics.blueprint(registry)):
        app.register_blueprint(blueprint)
    plugins.routes(app)
    return app
