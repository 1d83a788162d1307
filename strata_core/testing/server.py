"""A real server process for tests: started, waited for, stopped by its process id."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

import attrs

STRATA = (sys.executable, "-c", "from strata_core.cli import main; main()")
"""The ``strata`` command of this interpreter, whatever ``PATH`` says."""

_READY = re.compile(r"strata serve: ready at (\S+)")


@attrs.define
class LiveServer:
    """A running server.

    :ivar url: where it listens, without a slash at the end.
    :ivar lines: what it has written to stderr so far.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = attrs.field(factory=list)
    _reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """The first line that matches.

        :raises TimeoutError: none did in ``timeout`` seconds, or the server ended without one.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None and not (self._reader and self._reader.is_alive())
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found:
                    return found
            if ended or time.monotonic() > deadline:
                state = f"ended with {self.process.returncode}" if ended else f"did not say it in {timeout:g} s"
                raise TimeoutError(f"no line matches {pattern!r}; the server {state}. It wrote:\n{self.log}")
            time.sleep(0.02)

    def wait_until_healthy(self, timeout: float = 60.0) -> None:
        """Wait until ``/health`` answers 200.

        :raises TimeoutError: it did not in ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise TimeoutError(f"{self.url}/health is not ok after {timeout:g} s. The server wrote:\n{self.log}")

    def stop(self, timeout: float = 60.0) -> int:
        """Ask it to stop (SIGTERM) and wait; returns the exit code. Killed after ``timeout`` seconds."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end; returns the exit code. Killed after ``timeout`` seconds."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self._reader is not None:
            self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code

    def _read(self) -> None:
        stream = self.process.stderr
        if stream is not None:
            self.lines.extend(iter(stream.readline, ""))


def start(command: Sequence[str], env: Mapping[str, str] | None = None, *, ready_s: float = 120.0) -> LiveServer:
    """Start a server and wait until it says where it listens and answers there.

    :param command: what to run; it must print the ready line of ``strata serve`` to stderr.
    :param env: variables in addition to this process's.
    :raises TimeoutError: it ended or was not ready in time; the message has what it wrote.
    """
    server = launch(command, env)
    try:
        server.url = server.wait_for_line(_READY.pattern, ready_s)[1]
        server.wait_until_healthy()
    except BaseException:
        server.stop(10)
        raise
    return server


def launch(command: Sequence[str], env: Mapping[str, str] | None = None) -> LiveServer:
    """Start a server without waiting for it."""
    process = subprocess.Popen(
        list(command),
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    server = LiveServer(process)
    server._reader = threading.Thread(target=server._read, name="server-log", daemon=True)
    server._reader.start()
    return server


def serve(*arguments: str, env: Mapping[str, str] | None = None, ready_s: float = 120.0) -> LiveServer:
    """``strata serve`` on a free port, with further arguments."""
    return start((*STRATA, "serve", "--port", "0", *arguments), env, ready_s=ready_s)
