"""Connections of clients that have vanished or stalled must not hold a thread for ever.

A peer that loses its power or its network sends nothing any more, not even an end. gunicorn's threads would wait for
the rest of its request, or for room to send, without a bound; as many such clients as there are threads, and the
server answers nobody. The kernel's own time limits leave the socket in blocking mode, as gunicorn wants it.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any

RECEIVE_S = 30.0
"""Longest silence of a client in the middle of its request, in seconds."""
SEND_S = 300.0
"""Longest time for which a client may take nothing of what is sent to it: long, as it may be stopped in a debugger."""


class ClientSocket(socket.socket):
    """A client's connection. What takes too long counts as a reset by the client."""

    @classmethod
    def adopt(cls, sock: socket.socket) -> ClientSocket:
        """The connection of ``sock``, which is no longer usable afterwards."""
        adopted = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        for option, seconds in ((socket.SO_RCVTIMEO, RECEIVE_S), (socket.SO_SNDTIMEO, SEND_S)):
            whole = int(seconds)
            limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))  # struct timeval
            adopted.setsockopt(socket.SOL_SOCKET, option, limit)
        return adopted

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        try:
            return super().recv(bufsize, flags)
        except BlockingIOError:
            if flags & socket.MSG_DONTWAIT or self.gettimeout() is not None:
                raise  # not to wait is what was asked for
            raise _reset("nothing came from the client for too long") from None

    def sendall(self, data: Any, flags: int = 0) -> None:
        try:
            super().sendall(data, flags)
        except BlockingIOError:
            if self.gettimeout() is not None:
                raise
            raise _reset("the client took nothing for too long") from None


def _reset(why: str) -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, why)
