"""Failures that nobody looked at raise, once; those that somebody looked at never do."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref

import pytest

from penstock.client import DeliveryFailedError, RecordMetadata
from penstock.client.delivery import AsyncDeliveryFuture, DeliveryFuture, FailureLedger
from penstock.wire.errors import LeaderHint, NotLeaderError

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
    with pytest.raises(
        DeliveryFailedError, match=r"^1 record was not delivered, and nobody read its future "
    ):
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
    with pytest.raises(DeliveryFailedError, match=r"^1 record was.*new"):
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


def depth(error: BaseException) -> int:
    return sum(1 for _ in traceback.walk_tb(error.__traceback__))


def raised_by(future: DeliveryFuture) -> BaseException:
    with pytest.raises(NotLeaderError) as caught:
        future.result()
    return caught.value


def shared_failure() -> NotLeaderError:
    error = NotLeaderError("broker 2 does not lead t-0", leader=LeaderHint(3, 7, "h", 9))
    error.__cause__ = ValueError("beneath")
    error.add_note("a note")
    return error


def test_the_records_of_a_failed_batch_raise_an_exception_each() -> None:
    error = shared_failure()
    futures = [DeliveryFuture() for _ in range(1_000)]
    for future in futures:
        future.refuse(error)
    raised = [raised_by(future) for future in futures]
    assert len({id(one) for one in raised}) == 1_000
    assert {depth(one) for one in raised} == {depth(raised[0])}
    assert error.__traceback__ is None


def test_an_exception_of_its_own_says_all_that_the_shared_one_does() -> None:
    future = DeliveryFuture()
    future.refuse(shared_failure())
    raised = raised_by(future)
    assert isinstance(raised, NotLeaderError)
    assert raised.message == "broker 2 does not lead t-0"
    assert raised.leader == LeaderHint(3, 7, "h", 9)
    assert str(raised.__cause__) == "beneath"
    assert raised.__notes__ == ["a note"]
    raised.add_note("the application's own")
    other = DeliveryFuture()
    other.refuse(shared_failure())
    assert raised_by(other).__notes__ == ["a note"]


def test_asking_one_future_a_thousand_times_makes_no_longer_traceback() -> None:
    future = DeliveryFuture()
    future.refuse(shared_failure())
    first = depth(raised_by(future))
    for _ in range(1_000):
        again = raised_by(future)
    assert depth(again) == first
    assert again is future.exception()


async def test_the_futures_of_the_asyncio_producer_have_an_exception_each() -> None:
    error = shared_failure()
    futures = [AsyncDeliveryFuture() for _ in range(1_000)]
    for future in futures:
        future.refuse(error)
    raised = await asyncio.gather(*futures, return_exceptions=True)
    assert len({id(one) for one in raised}) == 1_000
    for _ in range(1_000):
        with pytest.raises(NotLeaderError) as caught:
            await futures[0]
    assert depth(caught.value) < 10
    assert error.__traceback__ is None


def test_an_exception_that_is_not_ours_is_raised_as_it_is() -> None:
    error = ValueError("no")
    future = DeliveryFuture()
    future.refuse(error)
    for _ in range(1_000):
        with pytest.raises(ValueError, match="no") as caught:
            future.result()
    assert caught.value is error
    assert depth(error) < 10
