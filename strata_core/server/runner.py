"""``strata serve``: which WSGI server carries the application, and where it listens."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from strata_core.errors import SettingsError
from strata_core.server.holder import Progress
from strata_core.server.service import OpenEngine, Service
from strata_core.settings import Settings

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine
    from strata_core.plugins import Plugins

BACKLOG = 512


def choose_server(wanted: str, os_name: str) -> str:
    """``gunicorn`` or ``waitress`` for a setting (``auto``, or one of them) on a platform (``os.name``).

    :raises SettingsError: gunicorn was asked for where it does not run.
    """
    if wanted == "auto":
        return "waitress" if os_name == "nt" else "gunicorn"
    if wanted == "gunicorn" and os_name == "nt":
        raise SettingsError("server: gunicorn does not run on Windows; use waitress", param="server")
    return wanted


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is an error at once and port 0 has its number before anything else.

    :raises SettingsError: the name does not resolve, or the address cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}", param="port") from None


def url_of(sock: socket.socket) -> str:
    """Where clients on this machine reach a listening socket."""
    host, port = sock.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def _open_engine(settings: Settings, plugins: Plugins, progress: Progress) -> Engine:
    from strata_core.engine.engine import Engine

    return Engine.open(settings, plugins, progress=progress)


def serve(settings: Settings, plugins: Plugins, open_engine: OpenEngine = _open_engine) -> int:
    """Serve until told to stop.

    Nothing here touches a device: gunicorn forks, and a device that was initialised before a fork is unusable after
    it. The engine is opened in the process that serves.

    :returns: exit code.
    :raises StrataError: something is wrong before serving can begin.
    """
    kind = choose_server(settings.server, os.name)
    service = Service(settings, plugins, open_engine)
    sock = listen(settings.host, settings.port)
    # Each is imported only where it is used: gunicorn needs fcntl, waitress is optional where gunicorn runs.
    if kind == "gunicorn":
        from strata_core.server import gunicorn_runner

        return gunicorn_runner.run(service, sock, url_of(sock))
    try:
        from strata_core.server import waitress_runner
    except ImportError as error:
        raise SettingsError(f"server: {error}; pip install waitress, or use gunicorn", param="server") from None
    return waitress_runner.run(service, sock, url_of(sock))
