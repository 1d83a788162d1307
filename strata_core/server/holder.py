"""The server's one engine while it is loaded, used and put away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.errors import Overloaded, StrataError

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine

LOADING, OK, DRAINING, FAILED = "loading", "ok", "draining", "failed"

Progress = Callable[[str, float], None]
"""Called with the name of a stage and how much of it is done, 0 to 1."""


class EngineHolder:
    """Answers "is there an engine, and may it be given work?" for every HTTP thread.

    States go one way: ``loading`` -> ``ok`` -> ``draining``, or ``loading`` -> ``failed``. Draining may begin while
    the model still loads; the engine is then closed as soon as it is there.

    :ivar stage: what loading is busy with, and :ivar fraction: how much of that stage is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = LOADING
        self._engine: Engine | None = None
        self.stage = ""
        self.fraction = 0.0

    @property
    def state(self) -> str:
        return self._state

    def load(self, open_engine: Callable[[Progress], Engine], progress: Progress | None = None) -> Engine | None:
        """Open the engine and make it available; blocks until it is.

        :returns: the engine, or None when the server was told to stop meanwhile: it is closed again.
        :raises StrataError: whatever ``open_engine`` raised; the state is then ``failed``.
        """

        def report(stage: str, fraction: float) -> None:
            self.stage, self.fraction = stage, fraction
            if progress is not None:
                progress(stage, fraction)

        try:
            engine = open_engine(report)
        except BaseException:
            with self._lock:
                self._state = FAILED
            raise
        with self._lock:
            if self._state == LOADING:
                self._state, self._engine = OK, engine
                return engine
        engine.close()
        return None

    def engine(self) -> Engine:
        """The engine, for reading its state; also while draining.

        :raises Overloaded: it is still loading, or could not be loaded.
        """
        engine = self._engine
        if engine is None:
            if self._state == FAILED:
                raise Overloaded("the model could not be loaded; the server is about to stop", retry_after=30)
            detail = f" ({self.stage}, {self.fraction:.0%})" if self.stage else ""
            raise Overloaded(f"the model is still being loaded{detail}; ask /health until it says ok", retry_after=2)
        return engine

    def accepting(self) -> Engine:
        """The engine, for giving it new work.

        :raises Overloaded: it is loading, draining or could not be loaded.
        """
        engine = self.engine()
        if self._state == DRAINING:
            raise Overloaded("the server is draining before it stops and takes no new requests", retry_after=5)
        return engine

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        with self._lock:
            if self._state in (LOADING, OK):
                self._state = DRAINING

    def shut_down(self, timeout: float) -> StrataError | None:
        """Drain: let running requests end within ``timeout`` seconds, keep the conversations, close the engine.

        An engine that is still being opened is closed by :meth:`load` once it is there.

        :returns: what failed while draining, to be shown; the engine is closed all the same.
        """
        self.begin_drain()
        with self._lock:
            engine = self._engine
        if engine is None:
            return None
        try:
            engine.drain(timeout)
        except StrataError as error:
            return error
        finally:
            engine.close()
        return None
