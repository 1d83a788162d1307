"""``GET /health`` and ``GET /``: is it alive, and what is it."""

from __future__ import annotations

import flask

import strata_core
from strata_core.server import common, holder

blueprint = flask.Blueprint("health", __name__)


@blueprint.get("/health")
def health() -> flask.Response:
    """200 ``ok`` only when requests are taken; 503 with ``Retry-After`` while loading or draining. Needs no key."""
    here = common.parts().holder
    state = here.state
    body: dict[str, object] = {"status": state}
    if state == holder.LOADING and here.stage:
        body |= {"stage": here.stage, "progress": round(here.fraction, 3)}
    response = flask.jsonify(body)
    if state != holder.OK:
        response.status_code = 503
        response.headers["Retry-After"] = "2" if state == holder.LOADING else "5"
    return response


@blueprint.get("/")
def root() -> flask.Response:
    """What this is and where its description is."""
    return flask.jsonify(
        {
            "service": "strata",
            "version": strata_core.__version__,
            "api": "OpenAI-compatible",
            "docs": "docs/http-api.md",
        }
    )
