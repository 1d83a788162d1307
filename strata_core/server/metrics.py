"""``GET /metrics``: Prometheus text, or JSON for people and scripts."""

from __future__ import annotations

from typing import Any

import flask
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from strata_core.errors import InvalidRequest
from strata_core.server.collector import EngineCollector, Latencies
from strata_core.server.holder import EngineHolder


def new_registry(holder: EngineHolder) -> tuple[CollectorRegistry, Latencies]:
    """A registry of this application's own: the library's global one would mix several applications of a process."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(holder))
    return registry, Latencies(registry)


def blueprint(registry: CollectorRegistry) -> flask.Blueprint:
    found = flask.Blueprint("metrics", __name__)

    @found.get("/metrics")
    def metrics() -> flask.Response:
        if _wants_json():
            return flask.jsonify(as_json(registry))
        encode, content_type = choose_encoder(flask.request.headers.get("Accept", ""))
        return flask.Response(encode(registry), content_type=content_type)

    return found


def _wants_json() -> bool:
    wanted = flask.request.args.get("format")
    if wanted is None:
        accepted = flask.request.accept_mimetypes
        # Scrapers that accept anything get Prometheus text.
        return accepted.best_match(["text/plain", "application/json"], "text/plain") == "application/json"
    if wanted not in ("json", "prometheus"):
        raise InvalidRequest(f"format must be json or prometheus, not {wanted!r}", param="format")
    return wanted == "json"


def as_json(registry: CollectorRegistry) -> dict[str, Any]:
    """Every sample by its name: a number, or for labelled ones a list of ``{"labels", "value"}``."""
    found: dict[str, Any] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.labels:
                found.setdefault(sample.name, []).append({"labels": dict(sample.labels), "value": sample.value})
            else:
                found[sample.name] = sample.value
    return found
