"""The life of a server process, whichever WSGI server carries it: load, say so, serve, drain."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import flask
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as ProgressBar

from strata_core.errors import StrataError
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder, Progress
from strata_core.settings import Settings

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine
    from strata_core.plugins import Plugins

log = logging.getLogger("strata.server")

OpenEngine = Callable[[Settings, "Plugins", Progress], "Engine"]


def say(message: str) -> None:
    """One line on stderr with the prefix that all lines for the operator have."""
    print(f"strata serve: {message}", file=sys.stderr, flush=True)


@attrs.define
class Service:
    """An application and the engine behind it. Made before the WSGI server starts, when errors are easiest to show.

    :ivar open_engine: makes the engine; called once per process, in the process that serves.
    """

    settings: Settings
    plugins: Plugins
    open_engine: OpenEngine
    holder: EngineHolder = attrs.field(factory=EngineHolder)
    app: flask.Flask = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """:raises StrataError: see :func:`create_app`."""
        self.app = create_app(self.holder, self.settings, self.plugins)

    @property
    def threads(self) -> int:
        """Every waiting or streaming request holds a thread; some more answer /health and refusals meanwhile."""
        return self.settings.parallel + self.settings.queue + 16

    def load_in_background(self, url: str, ready: Callable[[], None], failed: Callable[[int], None]) -> None:
        """Start opening the engine, so that /health answers meanwhile.

        :param ready: called once the server is usable; :param failed: called with the exit code for the process.
        """
        run = threading.Thread(target=self._load, args=(url, ready, failed), name="strata-load", daemon=True)
        run.start()

    def _load(self, url: str, ready: Callable[[], None], failed: Callable[[int], None]) -> None:
        try:
            with LoadingDisplay() as display:
                engine = self.holder.load(
                    lambda progress: self.open_engine(self.settings, self.plugins, progress), display.show
                )
        except StrataError as error:
            say(f"error: {error.message}")
            failed(error.exit_code)
        except BaseException:
            log.exception("loading the model failed")
            failed(1)
        else:
            if engine is not None:
                ready()
                self._announce(engine, url)

    def _announce(self, engine: Engine, url: str) -> None:
        backend = str(engine.facts["backend"])
        say(
            f"ready at {url} (model {engine.name}, backend {backend},"
            f" context {engine.max_context}, slots {engine.parallel})"
        )
        engine.announce(url)

    def stop(self) -> None:
        """Drain and close. Blocks up to the drain time and what keeping the conversations takes."""
        say("draining: no new requests, running ones may finish")
        failure = self.holder.shut_down(self.settings.drain_s)
        if failure is not None:
            say(f"error while draining: {failure.message}")


class LoadingDisplay:
    """How far loading is: a bar on a terminal, elsewhere one line per stage."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: ProgressBar | None = None
        self._task: Any = None
        self._stage = ""

    def __enter__(self) -> LoadingDisplay:
        if self._console.is_terminal:
            columns = (TextColumn("strata serve: {task.description}"), BarColumn(), TaskProgressColumn())
            self._bar = ProgressBar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("loading", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, stage: str, fraction: float) -> None:
        """Called by the loading thread with every step of progress."""
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=fraction)
        elif stage != self._stage:
            say(stage)
        self._stage = stage
