"""The choices of one HTTP request while the engine works on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs

from strata_core.engine.requests import (
    Event,
    Failed,
    Finished,
    Request,
    RequestHandle,
    RequestRecord,
    Started,
    new_request_id,
)
from strata_core.errors import Cancelled, Overloaded
from strata_core.server.disconnect import POLL_S, Probe

_SWEEP_S = 0.01


@attrs.frozen
class ChoiceEvent:
    """An event of choice ``index``."""

    index: int
    event: Event


@attrs.frozen
class Idle:
    """Nothing has happened for ``seconds`` (since the last event)."""

    seconds: float


class Running:
    """Merges the events of one or more requests that answer one HTTP request, and watches its client meanwhile.

    Whichever way the consumer leaves (end, error, client gone, generator closed), :meth:`cancel` stops what is still
    running: it must be called, and may be called more than once.
    """

    def __init__(self, handles: Sequence[RequestHandle], client_gone: Probe):
        self._handles = tuple(handles)
        self._live = dict(enumerate(self._handles))
        self._gone = client_gone
        self._looked = time.monotonic()
        self.records: dict[int, RequestRecord] = {}
        self.started: dict[int, Started] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(handle.id for handle in self._handles)

    @property
    def done(self) -> bool:
        return not self._live

    def cancel(self) -> None:
        """Stop every request that has not ended."""
        for handle in self._live.values():
            handle.cancel()

    def events(self) -> Iterator[ChoiceEvent | Idle]:
        """Events of all choices as they come, with an :class:`Idle` about ten times a second while none do.

        :raises Cancelled: the client hung up; everything is cancelled.
        :raises StrataError: a choice failed; the others are cancelled.
        """
        last = time.monotonic()
        while self._live:
            self._look()
            item = self._next()
            if item is None:
                yield Idle(time.monotonic() - last)
                continue
            last = time.monotonic()
            self._note(item)
            yield item

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < POLL_S:
            return
        self._looked = now
        if self._gone():
            self.cancel()
            raise Cancelled("the client closed the connection")

    def _next(self) -> ChoiceEvent | None:
        if len(self._live) == 1:
            ((index, handle),) = self._live.items()
            event = handle.next_event(timeout=POLL_S)
            return None if event is None else ChoiceEvent(index, event)
        deadline = time.monotonic() + POLL_S
        while time.monotonic() < deadline:
            for index, handle in self._live.items():
                event = handle.next_event(timeout=0)
                if event is not None:
                    # To the back, so that one busy choice does not keep the others waiting.
                    self._live[index] = self._live.pop(index)
                    return ChoiceEvent(index, event)
            time.sleep(_SWEEP_S)
        return None

    def _note(self, item: ChoiceEvent) -> None:
        event = item.event
        if isinstance(event, Started):
            self.started[item.index] = event
        elif isinstance(event, Finished):
            self.records[item.index] = event.record
            del self._live[item.index]
        elif isinstance(event, Failed):
            del self._live[item.index]
            self.cancel()
            if isinstance(event.error, Cancelled):
                # The client is there and did not ask for it: the server is stopping.
                raise Overloaded("the request was cancelled because the server is stopping", retry_after=5)
            raise event.error


def choice_requests(first: Request, count: int) -> tuple[Request, ...]:
    """``first`` and ``count - 1`` more choices of the same prompt.

    They wait until the first has read the prompt and then share it. With a seed each gets its own, counted up from
    the given one: equal seeds would give equal replies.
    """
    seed = first.sampling.seed
    others = (
        attrs.evolve(
            first,
            id=new_request_id(),
            after=first.id,
            pin=False,
            progress=False,
            sampling=first.sampling if seed is None else attrs.evolve(first.sampling, seed=seed + index),
        )
        for index in range(1, count)
    )
    return (first, *others)
