"""Failures that nobody looked at raise, once; those that somebody looked at never do."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from penstock.client import DeliveryFailedError, RecordMetadata
from penstock.client.delivery import DeliveryFuture, FailureLedger

MANY = 20_000


def fail(ledger: FailureLedger, error: BaseException) -> DeliveryFuture:
    future = DeliveryFuture()
    future.refuse(error)
    ledger.add(future, error)
    return future


def test_however_many_failures_were_read_none_raises() -> None:
    ledger = FailureLedger()
    for number in range(MANY):
        future = DeliveryFuture()
        future.refuse(ValueError(number))
        future.exception()
        ledger.add(future, ValueError(number))
    ledger.raise_unread()


def test_failures_read_after_they_all_came_do_not_raise() -> None:
    ledger = FailureLedger()
    futures = [fail(ledger, ValueError(number)) for number in range(MANY)]
    for future in futures[1:]:
        assert future.exception() is not None
    with pytest.raises(DeliveryFailedError, match=r"^1 records"):
        ledger.raise_unread()
    futures += [fail(ledger, ValueError(number)) for number in range(MANY)]
    for future in futures:
        with pytest.raises(ValueError, match=r"\d"):
            future.result()
    ledger.raise_unread()


def test_what_is_raised_counts_and_names_the_first_unread() -> None:
    ledger = FailureLedger()
    ledger.delivered = 7
    for number in range(300):
        future = fail(ledger, ValueError(f"number {number}"))
        if number < 250:
            future.exception()
    with pytest.raises(DeliveryFailedError, match=r"^50 records.*7 were.*number 250") as caught:
        ledger.raise_unread()
    assert str(caught.value.__cause__) == "number 250"
    ledger.raise_unread()


def test_reading_what_was_raised_before_takes_nothing_from_what_came_since() -> None:
    ledger = FailureLedger()
    old = fail(ledger, ValueError("old"))
    with pytest.raises(DeliveryFailedError):
        ledger.raise_unread()
    fail(ledger, ValueError("new"))
    old.exception()
    with pytest.raises(DeliveryFailedError, match=r"^1 records.*new"):
        ledger.raise_unread()


def test_failures_are_not_kept_alive() -> None:
    ledger = FailureLedger()
    error = ValueError("no")
    alive = weakref.WeakSet(fail(ledger, error) for _ in range(1_000))
    gc.collect()
    assert len(alive) <= 100
    with pytest.raises(DeliveryFailedError, match=r"^1000 records"):
        ledger.raise_unread()
    gc.collect()
    assert len(alive) == 0


def test_readers_race_with_the_failures() -> None:
    ledger = FailureLedger()
    futures = [DeliveryFuture() for _ in range(2_000)]
    reader = threading.Thread(target=lambda: [future.exception(30) for future in futures])
    reader.start()
    for future in futures:
        error = ValueError("no")
        future.refuse(error)
        ledger.add(future, error)
    reader.join(30)
    assert not reader.is_alive()
    ledger.raise_unread()


def test_a_delivery_has_its_place() -> None:
    future = DeliveryFuture()
    future.deliver(RecordMetadata("t", 0, 5, 9))
    assert future.result().offset == 5
    assert future.exception() is None
