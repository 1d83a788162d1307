"""``GET /props``: with which settings and which model this server runs."""

from __future__ import annotations

from typing import Any

import attrs
import flask

import strata_core
from strata_core.server import common
from strata_core.settings import Setting, Settings, SettingsTable, settings_of

blueprint = flask.Blueprint("props", __name__)


@blueprint.get("/props")
def props() -> flask.Response:
    """Version, model, chat template, and the effective value of every setting in the table that ``--help`` prints."""
    here = common.parts()
    engine = here.holder.engine()
    tokenizer, template = engine.tokenizer, engine.template
    return flask.jsonify(
        {
            "version": strata_core.__version__,
            "model": engine.name,
            "aliases": list(engine.aliases),
            "engine": {name: _jsonable(fact) for name, fact in engine.facts.items()},
            "geometry": attrs.asdict(engine.geometry),
            "max_context": engine.max_context,
            "total_slots": engine.parallel,
            "chat_template": None if template is None else template.source,
            "bos_token": _token_text(tokenizer, tokenizer.bos_id),
            "eos_token": _token_text(tokenizer, tokenizer.eos_id),
            "settings": effective(here.table, here.settings),
        }
    )


def _token_text(tokenizer: Any, token: int | None) -> str | None:
    return None if token is None else tokenizer.decode([token], skip_special=False)


def effective(table: SettingsTable, settings: Settings) -> dict[str, dict[str, Any]]:
    """Flag, value and source of every setting by its name. Secret values are only said to be set or not."""
    found: dict[str, dict[str, Any]] = {}
    for owner, cls in table.classes:
        instance = settings if cls is Settings else settings.plugin(cls)
        for spec in settings_of(cls):
            found[spec.name] = {
                "flag": spec.flag,
                "value": _shown(spec, getattr(instance, spec.name)),
                "source": settings.sources.get(spec.name, "default"),
                "owner": owner,
            }
    return found


def _shown(spec: Setting, value: Any) -> Any:
    if spec.secret:
        return "set" if value else None
    return _jsonable(value)


def _jsonable(value: Any) -> Any:
    """A setting or fact as JSON: values of classes by their fields, everything else that JSON lacks as text."""
    if attrs.has(type(value)):
        return attrs.asdict(value)
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return value
    return str(value)
