"""``GET /v1/plugins`` and ``GET /v1/levels``: what is installed, and where conversations can go."""

from __future__ import annotations

import attrs
import flask

from strata_core.server import common

blueprint = flask.Blueprint("extensions", __name__)


@blueprint.get("/v1/plugins")
def plugins() -> flask.Response:
    """Every known plugin with its status: active, blocked or failed, and why."""
    return flask.jsonify({"object": "list", "data": [attrs.asdict(info) for info in common.parts().plugins.listing()]})


@blueprint.get("/v1/levels")
def levels() -> flask.Response:
    """Every level in use, from RAM downwards: what it holds and what it may hold (null: no bound)."""
    found = sorted(common.engine().levels(), key=lambda level: level.rank)
    return flask.jsonify({"object": "list", "data": [attrs.asdict(level) for level in found]})
