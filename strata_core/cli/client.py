"""What the commands that talk to a running server share: where it is, which key to send, what its errors say."""

from __future__ import annotations

import json

from strata_core.settings import Settings

CLIENT = ("host", "port", "api_key", "api_key_file", "plugins", "disable_plugins")
"""Settings that mean something to whoever talks to a server."""

_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def server_address(url: str | None, settings: Settings) -> str:
    """Where the server is, without the path of its API: what the user says, or where the settings have one listen."""
    if url:
        return url.rstrip("/").removesuffix("/v1")
    host = _EVERYWHERE.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def server_key(settings: Settings) -> str | None:
    """The first API key of the settings or of the key file.

    :raises SettingsError: the file cannot be read or has no key in it.
    """
    from strata_core.server.security import load_keys  # not before it is needed: Flask comes with it

    return next(iter(load_keys(settings)), None)


def error_message(raw: bytes) -> str:
    """The message in an error's body; empty where it is of another shape."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
