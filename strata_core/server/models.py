"""``GET /v1/models``: the model that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flask

from strata_core.server import common

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine

blueprint = flask.Blueprint("models", __name__)


def _model_object(engine: Engine, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": common.parts().created,
        "owned_by": "strata",
        "max_model_len": engine.max_context,
        "architecture": engine.geometry.architecture,
    }


@blueprint.get("/v1/models")
def list_models() -> flask.Response:
    engine = common.engine()
    return flask.jsonify({"object": "list", "data": [_model_object(engine, n) for n in (engine.name, *engine.aliases)]})


@blueprint.get("/v1/models/<path:name>")
def show_model(name: str) -> flask.Response:
    engine = common.engine()
    common.check_model(engine, name)
    return flask.jsonify(_model_object(engine, name))
