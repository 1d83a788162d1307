"""Pytest plugin: fixtures for Strata's own tests and those of its plugins. Installing Strata makes them available."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from strata_core.testing.server import LiveServer


@pytest.fixture
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """A function like :func:`strata_core.testing.server.serve`; what it started is stopped after the test."""
    # Imported here: pytest loads this module in every project of an environment that has Strata.
    from strata_core.testing.server import serve

    started: list[LiveServer] = []

    def start(*arguments: str, **options: object) -> LiveServer:
        server = serve(*arguments, **options)  # type: ignore[arg-type]
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
