"""``POST /tokenize`` and ``/detokenize``, with llama.cpp's fields."""

from __future__ import annotations

from typing import Any

import flask

from strata_core.errors import InvalidRequest
from strata_core.server import common, fields
from strata_core.server.body import Body, read_json, refuse

blueprint = flask.Blueprint("tokens", __name__)


@blueprint.post("/tokenize")
def tokenize() -> flask.Response:
    """Token ids of ``content``; with ``with_pieces`` also their texts (bytes where they are no whole characters)."""
    engine = common.engine()
    body = Body(read_json(), fields.TOKENIZE)
    common.check_model(engine, body.text("model"))
    content = body.text("content")
    if content is None:
        raise InvalidRequest("content is missing", param="content")
    ids = engine.tokenizer.encode(
        content,
        parse_special=body.boolean("parse_special", True),
        add_special=body.boolean("add_special"),
    ).tolist()
    if not body.boolean("with_pieces"):
        return flask.jsonify({"tokens": ids})
    pieces = [{"id": token, "piece": _piece(engine.tokenizer.token_bytes(token))} for token in ids]
    return flask.jsonify({"tokens": pieces})


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


@blueprint.post("/detokenize")
def detokenize() -> flask.Response:
    """The text of ``tokens``, control tokens included."""
    engine = common.engine()
    body = Body(read_json(), fields.DETOKENIZE)
    common.check_model(engine, body.text("model"))
    ids = read_tokens("tokens", body.required("tokens"), engine.tokenizer.vocab_size)
    return flask.jsonify({"content": engine.tokenizer.decode(ids, skip_special=False)})


def read_tokens(name: str, value: Any, vocabulary: int) -> list[int]:
    """:raises InvalidRequest: ``value`` is not a list of ids of a vocabulary of that size."""
    if not isinstance(value, list):
        refuse(name, "an array of token ids", value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool):
            refuse(name, "an array of token ids", token)
        if not 0 <= token < vocabulary:
            raise InvalidRequest(f"{name}: token {token} does not exist; the vocabulary has {vocabulary}", param=name)
    return value
