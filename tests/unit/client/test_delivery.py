"""Failures that nobody looked at raise, once; those that somebody looked at never do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import traceback
import weakref

import pytest

from penstock.client import DeliveryFailedError, RecordMetadata
from penstock.client.delivery import AsyncDeliveryFuture, DeliveryFuture, FailureLedger, Receipt
from penstock.wire.errors import LeaderHint, NotLeaderError
from penstock.wire.ids import TopicPartition

MANY = 20_000
BATCH = 100
P0 = TopicPartition("t", 0)


def alone() -> DeliveryFuture:
    return DeliveryFuture(Receipt(P0), 0, 9)


def refuse(future: DeliveryFuture | AsyncDeliveryFuture, error: BaseException) -> None:
    FailureLedger().refuse(future.receipt, error, 1)


def fail(ledger: FailureLedger, error: BaseException) -> DeliveryFuture:
    future = alone()
    ledger.refuse(future.receipt, error, 1)
    return future


def batch_of(count: int) -> tuple[Receipt, list[DeliveryFuture]]:
    receipt = Receipt(P0)
    return receipt, [DeliveryFuture(receipt, index, 9) for index in range(count)]


def test_however_many_failures_were_read_none_raises() -> None:
    ledger = FailureLedger()
    for number in range(MANY // BATCH):
        receipt, futures = batch_of(BATCH)
        for future in futures[::2]:
            future.add_done_callback(lambda done: done.exception())
        ledger.refuse(receipt, ValueError(number), BATCH)
        for future in futures[1::2]:
            future.exception()
    ledger.raise_unread()


def test_of_a_batch_that_failed_those_count_that_nobody_looks_at() -> None:
    ledger = FailureLedger()
    receipt, futures = batch_of(BATCH)
    futures[3].add_done_callback(lambda done: None)
    ledger.refuse(receipt, ValueError("no"), BATCH)
    for _ in range(3):
        assert futures[5].exception() is not None
    with pytest.raises(ValueError, match="no"):
        futures[99].result()
    with pytest.raises(DeliveryFailedError, match=r"^97 records"):
        ledger.raise_unread()


def test_a_split_batch_tells_each_record_what_became_of_its_half() -> None:
    ledger = FailureLedger()
    receipt, futures = batch_of(10)
    heard: list[int] = []
    for future in futures[::3]:
        future.add_done_callback(lambda done: heard.append(done.result().offset))
    first, second = receipt.split(4)
    late = DeliveryFuture(receipt, 9, 9)
    second.deliver(100, -1)
    assert heard == [102, 105]
    assert [future.done() for future in futures] == [False] * 4 + [True] * 6
    assert [future.result().offset for future in futures[4:]] == list(range(100, 106))
    assert late.result().offset == 105
    parts = first.split(1)
    parts[0].deliver(50, 7)
    assert futures[0].result(0).timestamp_ms == 7
    ledger.refuse(parts[1], ValueError("no"), 3)
    with pytest.raises(ValueError, match="no"):
        futures[1].result()
    # The one that has a callback and the one that was asked are not unread.
    with pytest.raises(DeliveryFailedError, match=r"^1 record was"):
        ledger.raise_unread()


def test_futures_may_be_waited_for_together() -> None:
    receipt, futures = batch_of(4)
    other, others = batch_of(1)
    waiting = threading.Thread(target=lambda: concurrent.futures.wait([*futures, *others], 30))
    waiting.start()
    assert not futures[0].cancel()
    receipt.deliver(5, -1)
    other.deliver(-1, -1)
    waiting.join(30)
    assert not waiting.is_alive()
    found = {done.result().offset for done in concurrent.futures.as_completed(futures, 0)}
    assert found == {5, 6, 7, 8}
    assert others[0].result() == RecordMetadata("t", 0, -1, 9)


async def test_asyncio_may_wait_for_a_future_of_the_other_producer() -> None:
    receipt, (future,) = batch_of(1)
    waiting = asyncio.ensure_future(asyncio.wrap_future(future))
    await asyncio.sleep(0)
    receipt.deliver(5, -1)
    assert (await waiting).offset == 5


def test_what_is_not_there_in_time_says_so() -> None:
    _, (future,) = batch_of(1)
    with pytest.raises(TimeoutError):
        future.result(0)
    with pytest.raises(TimeoutError):
        future.exception(0)
    assert not future.done()
    assert future.running()


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
    futures = [alone() for _ in range(2_000)]
    reader = threading.Thread(target=lambda: [future.exception(30) for future in futures])
    reader.start()
    for future in futures:
        ledger.refuse(future.receipt, ValueError("no"), 1)
    reader.join(30)
    assert not reader.is_alive()
    ledger.raise_unread()


def test_a_delivery_has_its_place() -> None:
    future = alone()
    future.receipt.deliver(5, -1)
    assert future.result() == RecordMetadata("t", 0, 5, 9)
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
    futures = [alone() for _ in range(1_000)]
    for future in futures:
        refuse(future, error)
    raised = [raised_by(future) for future in futures]
    assert len({id(one) for one in raised}) == 1_000
    assert {depth(one) for one in raised} == {depth(raised[0])}
    assert error.__traceback__ is None


def test_an_exception_of_its_own_says_all_that_the_shared_one_does() -> None:
    future = alone()
    refuse(future, shared_failure())
    raised = raised_by(future)
    assert isinstance(raised, NotLeaderError)
    assert raised.message == "broker 2 does not lead t-0"
    assert raised.leader == LeaderHint(3, 7, "h", 9)
    assert str(raised.__cause__) == "beneath"
    assert raised.__notes__ == ["a note"]
    raised.add_note("the application's own")
    other = alone()
    refuse(other, shared_failure())
    assert raised_by(other).__notes__ == ["a note"]


def test_asking_one_future_a_thousand_times_makes_no_longer_traceback() -> None:
    future = alone()
    refuse(future, shared_failure())
    first = depth(raised_by(future))
    for _ in range(1_000):
        again = raised_by(future)
    assert depth(again) == first
    assert again is future.exception()


async def test_the_futures_of_the_asyncio_producer_have_an_exception_each() -> None:
    error = shared_failure()
    futures = [AsyncDeliveryFuture(Receipt(P0), 0, 9) for _ in range(1_000)]
    for future in futures:
        refuse(future, error)
    raised = await asyncio.gather(*futures, return_exceptions=True)
    assert len({id(one) for one in raised}) == 1_000
    for _ in range(1_000):
        with pytest.raises(NotLeaderError) as caught:
            await futures[0]
    assert depth(caught.value) < 10
    assert error.__traceback__ is None


def test_an_exception_that_is_not_ours_is_raised_as_it_is() -> None:
    error = ValueError("no")
    future = alone()
    refuse(future, error)
    for _ in range(1_000):
        with pytest.raises(ValueError, match="no") as caught:
            future.result()
    assert caught.value is error
    assert depth(error) < 10
