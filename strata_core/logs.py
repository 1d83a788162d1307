"""What the server says on stderr: one line a fact, under one prefix.

Loggers are named after rooms (``strata.cache``, ``strata.requests`` ...). Lines of the conversation cache and the one
of each request carry its name behind the prefix, so that they can be picked out:
``strata serve: conversation cache: parked 812 tokens ...``.
"""

from __future__ import annotations

import logging
import sys

_ROOMS = dict.fromkeys(("strata.cache", "strata.requests"), "conversation cache: ")


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"strata serve: {_ROOMS.get(record.name, '')}{level}{text}"


def log_to_stderr(level: str) -> None:
    """Send the lines of all ``strata`` loggers to stderr, from ``level`` on (debug, info, warning, error)."""
    root = logging.getLogger("strata")
    root.setLevel(level.upper())
    root.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    root.handlers[:] = [handler]
