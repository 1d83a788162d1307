"""Serving with waitress: one process, for platforms without fork."""

from __future__ import annotations

import os
import signal
import socket
import threading

import waitress

from strata_core.server.service import Service

_LINGER_S = 2.0


def run(service: Service, sock: socket.socket, url: str) -> int:
    """Serve until SIGINT, SIGTERM (or Ctrl+Break on Windows); returns the exit code."""
    server = waitress.create_server(
        service.app,
        sockets=[sock],
        threads=service.threads,
        connection_limit=service.threads + 100,
        channel_request_lookahead=1,  # what waitress needs to notice that a client has gone
        max_request_body_size=(service.settings.max_body_mib << 20) + (1 << 20),  # the application refuses earlier
        ident=None,
    )
    stop = threading.Event()
    outcome = [0]

    def failed(code: int) -> None:
        outcome[0] = code
        stop.set()

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: stop.set())
    serving = threading.Thread(target=server.run, name="strata-waitress", daemon=True)
    serving.start()
    service.load_in_background(url, ready=lambda: None, failed=failed)
    while not stop.wait(0.2):  # a wait without end would not let signals through on Windows
        pass
    if outcome[0] == 0:
        signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # asked twice: do not wait
        service.stop()
    server.task_dispatcher.shutdown(timeout=_LINGER_S)
    server.close()
    return outcome[0]
