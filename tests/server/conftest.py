from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from strata_core.plugins import Plugins
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder
from strata_core.settings import Settings
from strata_core.testing import server as live

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def make_client(engine):
    """A Flask test client for given settings, in front of the fake engine."""

    def make(loaded=True, engine=engine, **settings):
        holder = EngineHolder()
        if loaded:
            holder.load(lambda progress: engine)
        plugins = Plugins.load({}, builtin=(), entry_points=())
        client = create_app(holder, Settings(**settings), plugins).test_client()
        client.holder = holder
        return client

    return make


@pytest.fixture
def client(make_client):
    return make_client()


def _command(options):
    return [sys.executable, str(FAKE_SERVE), json.dumps(options)]


@pytest.fixture
def fake_server():
    """Starts a real server process with the fake engine: ``fake_server(load_s=..., settings={...})``."""
    started = []

    def start(wait=True, **options):
        server = live.start(_command(options)) if wait else live.launch(_command(options))
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop(20)


@pytest.fixture(scope="module")
def shared_server():
    """One such process for all tests of a module, for those that do not stop it."""
    server = live.start(_command({"settings": {"parallel": 2, "queue": 2}}))
    yield server
    assert server.stop(20) == 0, server.log
    assert "Traceback" not in server.log, server.log
