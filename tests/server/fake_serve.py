"""``strata serve`` with the fake engine: ``fake_serve.py '{"load_s": 0, "settings": {...}}'``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fake_engine import FakeEngine

from strata_core.errors import ModelFileError
from strata_core.plugins import Plugins
from strata_core.server import client_socket
from strata_core.server.runner import serve
from strata_core.settings import Settings


def main(options: dict) -> int:
    settings = Settings(**{"port": 0, **options.get("settings", {})})

    client_socket.RECEIVE_S = options.get("receive_s", client_socket.RECEIVE_S)

    def open_engine(settings, plugins, progress):
        progress("reading weights", 0.5)
        time.sleep(options.get("load_s", 0))
        if options.get("broken"):
            raise ModelFileError("the file is broken")
        engine = FakeEngine(parallel=settings.parallel, queue=settings.queue)
        progress("ready", 1.0)
        if "closed" in options:
            closed = Path(options["closed"])
            engine.close = lambda: closed.write_text("closed")
        return engine

    return serve(settings, Plugins.load({}, builtin=(), entry_points=()), open_engine)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
