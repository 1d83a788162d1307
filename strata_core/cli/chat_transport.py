"""How ``strata chat`` reaches a model: over HTTP, or through the same application inside this process."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from werkzeug.test import EnvironBuilder, run_wsgi_app

from strata_core.cli.client import error_message
from strata_core.errors import StrataError
from strata_core.server.app import create_app
from strata_core.server.holder import EngineHolder
from strata_core.server.service import LoadingDisplay
from strata_core.settings import Settings

if TYPE_CHECKING:
    from strata_core.plugins import Plugins

_PATH = "/v1/chat/completions"


class ChatError(StrataError):
    """The server refused a request or cannot be reached; the message is the server's."""

    code = "chat_error"


class Transport(Protocol):
    """Sends a chat request and yields the JSON objects of its stream.

    Leaving the context early (an exception, Ctrl+C) cancels the reply.
    """

    def stream(self, body: dict[str, Any]) -> Any: ...


@attrs.frozen
class Remote:
    """A server at ``url``."""

    url: str
    key: str | None = attrs.field(default=None, repr=False)

    def answers(self) -> bool:
        """Whether anything speaks HTTP there."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            return False

    def check(self) -> None:
        """:raises ChatError: nothing answers there."""
        if not self.answers():
            raise ChatError(f"no server answers at {self.url}")

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}{_PATH}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as reply:
                yield read_events(reply)
        except urllib.error.HTTPError as error:
            raise ChatError(_said(error.read())) from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url}: {error}") from None


class Local:
    """The model in this process, behind the application that serves it over HTTP elsewhere."""

    def __init__(self, settings: Settings, plugins: Plugins):
        self._settings = attrs.evolve(settings, host="127.0.0.1", api_key=(), api_key_file=None, allowed_host=())
        self._plugins = plugins
        self._holder = EngineHolder()

    def __enter__(self) -> Local:
        """:raises StrataError: the model cannot be loaded."""
        from strata_core.engine.engine import Engine

        with LoadingDisplay() as display:
            self._holder.load(
                lambda progress: Engine.open(self._settings, self._plugins, progress=progress), display.show
            )
        self._app = create_app(self._holder, self._settings, self._plugins)
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.shut_down(0)

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        builder = EnvironBuilder(path=_PATH, method="POST", json=body)
        try:
            chunks, status, _ = run_wsgi_app(self._app, builder.get_environ())
        finally:
            builder.close()
        try:
            if not status.startswith("200"):
                raise ChatError(_said(b"".join(chunks)))
            yield read_events(_lines(chunks))
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        yield from chunk.splitlines()


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to ``[DONE]``.

    :raises ChatError: an error came instead of the rest of the reply.
    """
    for line in lines:
        text = line.decode("utf-8", "replace").strip()
        if not text.startswith("data:"):
            continue
        text = text.removeprefix("data:").strip()
        if text == "[DONE]":
            return
        event = json.loads(text)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", "the reply failed")))
        yield event


def _said(raw: bytes) -> str:
    return error_message(raw) or raw.decode("utf-8", "replace")[:500] or "the server gave no reason"
