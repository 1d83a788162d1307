"""Noticing that the client of a request has gone, while there is nothing to write to it."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

POLL_S = 0.1
"""Longest time between two looks at a client's connection, in seconds."""

_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP if hasattr(select, "poll") else 0
"""What ``poll`` says of a peer that has closed its end, also behind bytes not yet read. The first is Linux's."""

Probe = Callable[[], bool]
"""Answers whether the client has gone; cheap, never blocks."""


def probe_of(environ: Mapping[str, Any]) -> Probe:
    """How to ask the server that runs this request (WSGI ``environ``) about its client.

    gunicorn hands out the socket, waitress a function. Under any other server a vanished client is noticed only when
    something is written to it.
    """
    sock = environ.get("gunicorn.socket")
    if sock is not None:
        return lambda: has_hung_up(sock)
    ask = environ.get("waitress.client_disconnected")
    if ask is not None:
        return lambda: bool(ask())
    return lambda: False


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed its end. Bytes it may have sent meanwhile stay where they are.

    A peer that only closed its writing half looks the same and counts as gone, as it does for other servers.
    """
    try:
        poll = select.poll()  # select() cannot watch descriptors above 1023
        poll.register(sock, select.POLLIN | _GONE)
        found = poll.poll(0)
        if not found:
            return False
        if found[0][1] & _GONE:
            return True
        # A flag for this call rather than setblocking(): the socket's writer relies on its mode.
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except (OSError, ValueError):  # reset, or closed by the server itself
        return True
