"""Who may use the server: API keys, Host names, browser origins, and whose cache a request may share."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

import attrs
import flask

from strata_core.errors import Forbidden, SettingsError, Unauthorized
from strata_core.settings.core import Settings

OPEN_ENDPOINTS = frozenset({"health.health"})
"""Endpoints that need neither key nor known Host: orchestrators send neither, and nothing private is in them."""

_ALLOWED_METHODS = "GET, POST, DELETE, OPTIONS"


def load_keys(settings: Settings) -> tuple[str, ...]:
    """The API keys of the settings and of the key file (one per line; empty lines and ``#`` comments do not count).

    :raises SettingsError: keys are given but are none; the file cannot be read or has no key; a key has spaces or
        characters beyond ASCII.
    """
    keys = list(settings.api_key)
    if not keys and "api_key" in settings.sources:
        # As `--api-key "$KEY"` is where KEY is not set.
        raise SettingsError(f"{settings.sources['api_key']}: there is no key in it", param="api_key")
    path = settings.api_key_file
    if path is not None:
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"api_key_file: cannot read {path}: {error}", param="api_key_file") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            # Serving everyone because the file is empty is the opposite of what its owner wants.
            raise SettingsError(f"api_key_file: {path} has no key in it", param="api_key_file")
        keys += found
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise SettingsError("api_key: a key is empty or has spaces or characters beyond ASCII", param="api_key")
    return tuple(dict.fromkeys(keys))


@attrs.frozen
class Gate:
    """Decides, before any endpoint runs, whether the current request may go on.

    :ivar keys: with keys, every request must carry one; Host and Origin then do not matter, because a web page that
        reaches the server through the user's browser does not know the key.
    :ivar hosts: lower-case Host names that are accepted without keys; ``*`` accepts all.
    :ivar any_address: accept every IP literal as Host: the server listens on all addresses, and an address (unlike a
        name) cannot be rebound to this machine by a foreign web page.
    :ivar origins: browser origins that may call from elsewhere; ``*`` accepts all.
    :ivar share_cache: one tenant for all keys.
    """

    keys: tuple[str, ...]
    hosts: frozenset[str]
    any_address: bool
    origins: frozenset[str]
    share_cache: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> Gate:
        """:raises SettingsError: the keys cannot be read."""
        return cls(
            keys=load_keys(settings),
            hosts=frozenset({"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_host)}),
            any_address=settings.host in ("0.0.0.0", "::", ""),
            origins=frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origin),
            share_cache=settings.share_cache,
        )

    def check(self, request: flask.Request) -> None:
        """:raises Unauthorized: no known key. :raises Forbidden: unknown Host or Origin (only without keys)."""
        if self.keys:
            if _presented(request) is None or self._matching(request) is None:
                raise Unauthorized("this server needs an API key: send Authorization: Bearer KEY or x-api-key: KEY")
            return
        host = host_name(request.headers.get("Host", ""))
        if not self._host_allowed(host):
            raise Forbidden(f"Host {host!r} is not known here; --allowed-host {host or 'NAME'} accepts it")
        origin = request.headers.get("Origin")
        if origin is not None and not self.origin_allowed(origin) and not _same_origin(origin, request):
            raise Forbidden(f"browser origin {origin!r} is not accepted; --allowed-origin {origin} accepts it")

    def tenant(self, request: flask.Request) -> str:
        """Whose conversations the request may resume: derived here from its key, never from what it says."""
        key = None if self.share_cache else self._matching(request)
        return "" if key is None else hashlib.sha256(b"strata tenant 1\0" + key.encode()).hexdigest()[:32]

    def origin_allowed(self, origin: str) -> bool:
        return "*" in self.origins or origin.rstrip("/").lower() in self.origins

    def _matching(self, request: flask.Request) -> str | None:
        presented = (_presented(request) or "").encode("utf-8", "surrogateescape")
        found = None
        for key in self.keys:  # all of them, whichever matches: the time must not tell which one was near
            if hmac.compare_digest(key.encode(), presented):
                found = key
        return found

    def _host_allowed(self, host: str) -> bool:
        if "*" in self.hosts or host in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or self.any_address


def _presented(request: flask.Request) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key")


def host_name(header: str) -> str:
    """The name in a Host header: lower case, without port, brackets and trailing dot."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _same_origin(origin: str, request: flask.Request) -> bool:
    # A proxy in front may speak https where we see http, so the scheme is not compared.
    try:
        return urlsplit(origin).netloc.lower() == request.headers.get("Host", "").lower() != ""
    except ValueError:  # half of an IPv6 address
        return False


def install(app: flask.Flask, gate: Gate) -> None:
    """Put ``gate`` in front of every endpoint of ``app`` and answer preflight requests of allowed origins."""

    @app.before_request
    def check() -> flask.Response | None:
        request = flask.request
        origin = request.headers.get("Origin", "")
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            if not gate.origin_allowed(origin) and not _same_origin(origin, request):
                raise Forbidden(f"browser origin {origin!r} is not accepted; --allowed-origin {origin} accepts it")
            return _preflight(request)
        if request.endpoint not in OPEN_ENDPOINTS:
            gate.check(request)
        return None

    @app.after_request
    def allow_reading(response: flask.Response) -> flask.Response:
        origin = flask.request.headers.get("Origin")
        if gate.origins:
            response.headers.add("Vary", "Origin")
        if origin is not None and gate.origin_allowed(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        return response


def _preflight(request: flask.Request) -> flask.Response:
    response = flask.Response(status=204)
    response.headers["Access-Control-Allow-Methods"] = _ALLOWED_METHODS
    wanted = request.headers.get("Access-Control-Request-Headers")
    if wanted:
        response.headers["Access-Control-Allow-Headers"] = wanted
    response.headers["Access-Control-Max-Age"] = "600"
    return response
