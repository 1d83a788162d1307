from __future__ import annotations

import threading

import pytest

from strata_core.events import Event, EventDispatcher, LevelWarning


def event(number: int) -> LevelWarning:
    return LevelWarning(level="cold", message=str(number))


def test_events_arrive_in_order_on_another_thread_before_close_returns() -> None:
    seen: list[tuple[Event, int]] = []
    dispatcher = EventDispatcher(lambda e: seen.append((e, threading.get_ident())))
    for number in range(50):
        dispatcher.emit(event(number))
    dispatcher.close()
    assert [e for e, _ in seen] == [event(number) for number in range(50)]
    assert threading.get_ident() not in {thread for _, thread in seen}
    assert dispatcher.dropped == 0


def test_a_slow_observer_delays_nobody_and_what_does_not_fit_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    started, release = threading.Event(), threading.Event()
    seen: list[Event] = []

    def slow(e: Event) -> None:
        started.set()
        release.wait(10)
        seen.append(e)

    dispatcher = EventDispatcher(slow, capacity=2)
    dispatcher.emit(event(0))
    assert started.wait(10)
    for number in range(1, 6):
        dispatcher.emit(event(number))
    assert dispatcher.dropped == 3
    assert len(caplog.records) == 1
    release.set()
    dispatcher.close()
    assert seen == [event(0), event(1), event(2)]


def test_events_after_close_are_counted_as_dropped() -> None:
    seen: list[Event] = []
    dispatcher = EventDispatcher(seen.append)
    dispatcher.close()
    dispatcher.emit(event(1))
    assert (seen, dispatcher.dropped) == ([], 1)


def test_close_does_not_wait_for_an_observer_that_hangs() -> None:
    release = threading.Event()
    dispatcher = EventDispatcher(lambda e: bool(release.wait(10)) and None, capacity=1)
    dispatcher.emit(event(0))
    dispatcher.emit(event(1))
    dispatcher.emit(event(2))
    dispatcher.close(timeout=0.05)
    assert not release.is_set()
    release.set()
