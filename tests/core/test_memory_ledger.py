from __future__ import annotations

import threading

import pytest

from strata_core.errors import OutOfMemory
from strata_core.memory.ledger import Account, MemoryLedger


def test_accounts_hold_what_was_reserved_and_remember_their_peak() -> None:
    ledger = MemoryLedger()
    ledger.reserve("pool", 100)
    ledger.reserve("weights", 7)
    ledger.release("pool", 60)
    assert ledger.snapshot() == {"pool": Account(40, 100), "weights": Account(7, 7)}
    assert ledger.held() == 47


def test_a_limit_is_hard_and_a_refusal_changes_nothing() -> None:
    ledger = MemoryLedger({"parked": 10})
    ledger.reserve("parked", 10)
    with pytest.raises(OutOfMemory, match="parked: 1 more bytes do not fit: 10 of 10 are held"):
        ledger.reserve("parked", 1)
    assert ledger.snapshot()["parked"] == Account(10, 10, 10)


def test_releasing_more_than_is_held_is_an_error() -> None:
    ledger = MemoryLedger()
    ledger.reserve("pool", 1)
    with pytest.raises(ValueError, match="2 bytes released, but only 1 are held"):
        ledger.release("pool", 2)
    with pytest.raises(ValueError, match="only 0 are held"):
        ledger.release("other", 1)
    assert ledger.held() == 1


@pytest.mark.parametrize("act", [MemoryLedger.reserve, MemoryLedger.release])
def test_negative_amounts_are_refused(act: object) -> None:
    with pytest.raises(ValueError, match="negative"):
        act(MemoryLedger(), "pool", -1)  # type: ignore[operator]


def test_threads_lose_no_bytes() -> None:
    ledger = MemoryLedger()

    def work() -> None:
        for _ in range(1000):
            ledger.reserve("pool", 3)
            ledger.release("pool", 2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.held() == 8 * 1000
