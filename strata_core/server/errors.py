"""Errors in the shape that OpenAI clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from typing import Any

import flask
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from strata_core.errors import InvalidRequest, Overloaded, StrataError, Unauthorized

log = logging.getLogger("strata.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    501: "not_supported_error",
}
_INTERNAL = "an internal error occurred; the server's log has the details"


def error_body(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The JSON object of an error; ``type`` follows from the status."""
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException) -> dict[str, Any]:
    """The JSON object for any exception; the message of one that is a bug stays in the log."""
    if isinstance(error, StrataError):
        return error_body(error.message, error.http_status, error.code, error.param)
    return error_body(_INTERNAL, 500, "internal_error")


def error_response(error: StrataError) -> flask.Response:
    """The HTTP reply that carries ``error``, with ``Retry-After`` where a later attempt may succeed."""
    response = flask.jsonify(describe(error))
    response.status_code = error.http_status
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _http_error(error: HTTPException) -> flask.Response:
    status = error.code or 500
    request = flask.request
    messages = {
        404: f"there is no {request.path} here; docs/http-api.md lists what there is",
        405: f"{request.path} does not answer to {request.method}",
    }
    codes = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
    message = messages.get(status, error.description or error.name)
    if isinstance(error, RequestEntityTooLarge):
        limit = (request.max_content_length or 0) / (1 << 20)
        message = f"the request body is larger than the {limit:g} MiB that --max-body-mib allows"
    response = flask.jsonify(error_body(message, status, codes.get(status)))
    response.status_code = status
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
    return response


def malformed_body(error: Exception) -> flask.Response:
    """The reply to a request whose body is not framed as HTTP wants it."""
    return error_response(InvalidRequest(f"the request body cannot be read: {error}"))


def _bug(error: Exception) -> flask.Response:
    log.exception("%s %s failed", flask.request.method, flask.request.path, exc_info=error)
    response = flask.jsonify(describe(error))
    response.status_code = 500
    return response


def install(app: flask.Flask) -> None:
    """Make every error of ``app`` a JSON object, whatever raised it."""
    app.register_error_handler(StrataError, error_response)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _bug)
