"""From a parsed request to its HTTP reply: submitting, streaming and collecting, the same for every dialect."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import flask
import numpy as np

from strata_core.engine.requests import Delta, Request
from strata_core.errors import Cancelled, InvalidRequest, StrataError
from strata_core.server import common, sse
from strata_core.server.disconnect import probe_of
from strata_core.server.errors import describe
from strata_core.server.fields import Options, check_logit_bias
from strata_core.server.running import ChoiceEvent, Idle, Running, choice_requests

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine

log = logging.getLogger("strata.server")


class Dialect(Protocol):
    """Turns the events of one HTTP request into the objects of an API. Used by one thread, for one reply."""

    def chunks(self, item: ChoiceEvent) -> Iterable[dict[str, Any]]:
        """The chunks of a stream that ``item`` makes; also what the whole reply is later put together from."""

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """The chunks after the last event: usage, if asked for."""

    def whole(self) -> dict[str, Any]:
        """The reply in one object, after all events went through :meth:`chunks`."""


def submit(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    options: Options,
    visible: frozenset[int] = frozenset(),
    prefix: int = 0,
) -> Running:
    """Give the engine every choice of every prompt (int32 token ids), choices of one prompt next to each other.

    :param visible: control tokens whose texts the reply's parser must see.
    :param prefix: leading tokens that other conversations share, as the client says; 0 for what it does not say.

    :raises InvalidRequest: more choices than can ever wait at once.
    :raises StrataError: the engine refuses one; none is then left running.
    """
    check_logit_bias(options.sampling, engine.tokenizer.vocab_size)
    room = engine.parallel + common.parts().settings.queue
    if len(prompts) * options.n > room:
        # Refused for good: "overloaded, try again" would be said for ever.
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {options.n} are {len(prompts) * options.n} choices, but slots and queue"
            f" (--parallel, --queue) hold {room}",
            param="prompt" if len(prompts) > 1 else "n",
        )
    running: list[Any] = []
    try:
        for prompt in prompts:
            first = Request(
                prompt=prompt,
                sampling=options.sampling,
                max_tokens=options.limit(engine.max_context - len(prompt)),
                stop=options.stop,
                ignore_eos=options.ignore_eos,
                cache=options.cache,
                pin=options.pin,
                prefix=prefix,
                tenant=common.tenant(),
                progress=options.progress,
                visible=visible,
            )
            running.extend(engine.submit(request) for request in choice_requests(first, options.n))
    except BaseException:
        for handle in running:
            handle.cancel()
        raise
    return Running(running, probe_of(flask.request.environ))


@attrs.define
class _Clock:
    """Feeds the latency histograms. ``arrived`` is on the monotonic clock, in seconds."""

    model: str
    arrived: float
    first: bool = True

    def watch(self, events: Iterator[ChoiceEvent | Idle]) -> Iterator[ChoiceEvent | Idle]:
        latencies = common.parts().latencies
        for item in events:
            if self.first and isinstance(item, ChoiceEvent) and isinstance(item.event, Delta):
                self.first = False
                latencies.first_token(self.model, time.monotonic() - self.arrived)
            yield item
        latencies.finished(self.model, time.monotonic() - self.arrived)


def reply(engine: Engine, running: Running, dialect: Dialect, options: Options, arrived: float) -> flask.Response:
    """Answer the current HTTP request with what ``running`` produces.

    :param arrived: ``time.monotonic()`` when the request came.
    :raises StrataError: the request failed before anything was sent.
    """
    try:
        events = _Clock(engine.name, arrived).watch(running.events())
        if options.stream:
            response = _stream(running, events, dialect, common.parts().settings.keep_alive_s)
        else:
            for item in events:
                if isinstance(item, ChoiceEvent):
                    for _ in dialect.chunks(item):
                        pass
            response = flask.jsonify(dialect.whole())
    except BaseException:
        running.cancel()
        raise
    response.headers["X-Request-Id"] = running.ids[0]
    return response


def _stream(
    running: Running, events: Iterator[ChoiceEvent | Idle], dialect: Dialect, keep_alive_s: float
) -> flask.Response:
    """A streamed reply. Headers wait for the first event, so that a request which fails at once gets its status.

    They do not wait longer than ``keep_alive_s``: proxies give up on a connection that stays silent.
    """
    head: list[ChoiceEvent | Idle] = []
    for item in events:
        if isinstance(item, ChoiceEvent) or item.seconds >= keep_alive_s:
            head.append(item)
            break
    body = _frames(running, itertools.chain(head, events), dialect, keep_alive_s)
    response = flask.Response(flask.stream_with_context(body), mimetype=sse.MIMETYPE, headers=sse.HEADERS)
    # The generator's own clean-up does not run when the client leaves before it was started.
    response.call_on_close(running.cancel)
    return response


def _frames(
    running: Running, events: Iterable[ChoiceEvent | Idle], dialect: Dialect, keep_alive_s: float
) -> Iterator[str]:
    sent = 0.0
    try:
        for item in events:
            if isinstance(item, ChoiceEvent):
                for chunk in dialect.chunks(item):
                    yield sse.data(chunk)
                    sent = time.monotonic()
            if time.monotonic() - sent >= keep_alive_s:
                yield sse.KEEP_ALIVE
                sent = time.monotonic()
        for chunk in dialect.last_chunks():
            yield sse.data(chunk)
        yield sse.DONE
    except Cancelled:
        return  # nobody listens
    except StrataError as error:
        yield from _last_words(error)
    except Exception as error:
        log.exception("a stream failed")
        yield from _last_words(error)
    finally:
        running.cancel()


def _last_words(error: Exception) -> Iterator[str]:
    yield sse.data(describe(error))
    yield sse.DONE

