"""Serving with gunicorn: a parent that holds the port, and one forked worker that has the engine."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

import flask
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.http.errors import ParseException
from gunicorn.workers.gthread import TConn, ThreadWorker

from strata_core.server.client_socket import ClientSocket
from strata_core.server.errors import malformed_body
from strata_core.server.service import Service, say

_KEEP_CONVERSATIONS_S = 30
"""After the drain time: what keeping conversations and closing the device may take before the worker is killed."""


class SharedState:
    """What the worker tells its parent, through a page that both see.

    :ivar ready: the worker has served; if it dies now, a new one may be expected to live.
    """

    _READY, _FAILED, _CODE = range(3)

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def ready(self) -> bool:
        return bool(self._bytes[self._READY])

    @ready.setter
    def ready(self, value: bool) -> None:
        self._bytes[self._READY] = int(value)

    def fail(self, code: int) -> None:
        self._bytes[self._CODE] = code & 0xFF
        self._bytes[self._FAILED] = 1

    @property
    def exit_code(self) -> int | None:
        """What the whole server shall exit with, if the worker said so."""
        return self._bytes[self._CODE] if self._bytes[self._FAILED] else None


class Worker(ThreadWorker):  # type: ignore[misc]
    """Keeps answering while it drains: new requests get 503, /health says ``draining``.

    gunicorn's own worker stops accepting at once, so clients would see refused connections instead.
    """

    _stopping = False

    def enqueue_req(self, conn: TConn) -> None:
        if not isinstance(conn.sock, ClientSocket):
            conn.sock = ClientSocket.adopt(conn.sock)
        super().enqueue_req(conn)

    def handle(self, conn: TConn) -> Any:
        """On a thread of the pool. gunicorn would close on the thread that accepts connections, and wait there for up
        to two seconds until the client closes its end too."""
        more = super().handle(conn)
        if more is False:
            conn.close(graceful=True)
            conn.close = _already_closed
        return more

    def init_signals(self) -> None:
        super().init_signals()
        # The terminal sends these to the whole process group. The parent gets them too and decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._stopping:
            self._stopping = True
            threading.Thread(target=self._drain, name="strata-drain", daemon=True).start()

    def _drain(self) -> None:
        try:
            self.app.service.stop()
        finally:
            super().handle_exit(signal.SIGTERM, None)

    def handle_quit(self, sig: int, frame: Any) -> None:
        os._exit(1)  # asked twice to stop: do not wait for anything


def _already_closed(graceful: bool = False) -> None:
    """What is left to do for a connection after it was closed on its own thread."""


class Parent(Arbiter):  # type: ignore[misc]
    """Exactly one worker, ever: two would load the model twice."""

    stopping = False

    def handle_int(self) -> None:
        raise StopIteration  # as SIGTERM: drain

    handle_hup = handle_quit = handle_int

    def handle_ttin(self) -> None:
        """gunicorn would start a second worker."""

    handle_ttou = handle_usr2 = handle_winch = handle_ttin

    def stop(self, graceful: bool = True) -> None:
        self.stopping = True
        super().stop(graceful)


class Application(BaseApplication):  # type: ignore[misc]
    """Hands gunicorn the application and its configuration, without reading any of gunicorn's own sources of it."""

    def __init__(self, service: Service, sock: socket.socket, url: str):
        self.service = service
        self._sock = sock
        self._url = url
        self._state = SharedState()
        super().__init__()

    def load_config(self) -> None:
        settings = self.service.settings
        debug = settings.log_level == "debug"
        for name, value in {
            "bind": f"fd://{self._sock.detach()}",
            "workers": 1,
            "worker_class": Worker,
            "threads": self.service.threads,
            "worker_connections": self.service.threads + 256,
            "timeout": 0,  # a busy or suspended machine must not cost the conversations in memory
            "graceful_timeout": int(settings.drain_s) + _KEEP_CONVERSATIONS_S,
            "keepalive": 30,
            "preload_app": False,
            "control_socket_disable": True,
            "accesslog": "-" if settings.access_log else None,
            "loglevel": "debug" if debug else "warning",
            "proc_name": "strata",
            "post_worker_init": self._worker_started,
            "child_exit": self._worker_ended,
        }.items():
            self.cfg.set(name, value)

    def load(self) -> flask.Flask:
        # gunicorn raises its own errors where a body is read whose chunks are malformed.
        self.service.app.register_error_handler(ParseException, malformed_body)
        return self.service.app

    def run(self) -> None:
        Parent(self).run()

    def _worker_started(self, worker: Worker) -> None:
        def ready() -> None:
            self._state.ready = True

        def failed(code: int) -> None:
            self._state.fail(code)
            sys.stderr.flush()
            os._exit(0)  # from a thread; the parent reads the code and says no more about it

        self.service.load_in_background(self._url, ready, failed)

    def _worker_ended(self, parent: Parent, worker: Worker) -> None:
        code = self._state.exit_code
        if code is not None:
            sys.exit(code)
        if parent.stopping:
            return
        if not self._state.ready:
            say("error: the process that loads the model died")
            sys.exit(1)
        self._state.ready = False
        say(f"the serving process {worker.pid} died and is started again; what was only in its memory is lost")


def run(service: Service, sock: socket.socket, url: str) -> int:
    """Serve until told to stop; returns the exit code (in the parent; the worker never returns)."""
    try:
        Application(service, sock, url).run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
