"""Producers that go from one transaction to the next, for which brokers keep their partitions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.client import (
    GroupMetadata,
    Producer,
    ProducerFencedError,
    RequestTimedOutError,
    TopicPartition,
)
from penstock.client.core import transaction
from penstock.v1 import groups_pb2, transactions_pb2
from penstock.wire.errors import CoordinatorNotAvailableError, PenstockError
from tests.support import wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.transactional import asked

LONG_MS = 60_000


@pytest.fixture(autouse=True)
def topic(background: Background) -> None:
    background.cluster.add_topic("a", 2)


@pytest.fixture
def producer(fake: FakeTransactions) -> Producer:
    """One whose loop goes on by itself."""
    return Producer(
        fake.cluster.bootstrap,
        transactional_id="t",
        linger_ms=0,
        retry_backoff_ms=10,
        retry_backoff_max_ms=10,
    )


def ends(fake: FakeTransactions) -> list[tuple[int, bool, list[tuple[str, int]]]]:
    """What ends were asked for: the epoch, whether to commit, and what to keep."""
    return [
        (
            end.producer_epoch,
            end.commit,
            sorted((one.topic, one.partition) for one in end.keep),
        )
        for end in asked(fake, transactions_pb2.EndTransactionRequest)
    ]


def until_asked(fake: FakeTransactions, count: int) -> None:
    wait_until(lambda: len(ends(fake)) >= count, f"{count} ends")


def write(producer: Any, *values: bytes) -> None:
    for value in values:
        with producer.transaction():
            producer.send("a", value, partition=0)
            producer.send("a", value, partition=1)


def test_the_second_in_a_row_says_where_the_third_will_write(
    make: Any, fake: FakeTransactions
) -> None:
    fake.kept_ms = LONG_MS
    with make() as producer:
        write(producer, b"1")
        both = [("a", 0), ("a", 1)]
        assert ends(fake) == [(0, True, [])]
        write(producer, b"2", b"3")
        assert ends(fake)[1:] == [(1, True, both), (2, True, both)]
    # What was kept is let go with the producer.
    assert ends(fake)[3:] == [(3, False, [])]
    assert fake.committed("a") == fake.committed("a", 1) == [b"1", b"2", b"3"]


def test_who_pauses_keeps_nothing(
    make: Any, fake: FakeTransactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "GOES_ON_MS", 0)
    fake.kept_ms = LONG_MS
    with make() as producer:
        write(producer, b"1", b"2", b"3")
    assert ends(fake) == [(0, True, []), (1, True, []), (2, True, [])]


def test_an_abort_keeps_nothing(make: Any, fake: FakeTransactions) -> None:
    fake.kept_ms = LONG_MS
    with make() as producer:
        write(producer, b"1")
        producer.begin_transaction()
        producer.send("a", b"2", partition=0)
        producer.flush()
        producer.abort_transaction()
    assert ends(fake) == [(0, True, []), (1, False, [])]


def test_a_coordinator_that_keeps_nothing_is_asked_for_nothing_more(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as producer:
        write(producer, b"1", b"2")
    assert [end[:2] for end in ends(fake)] == [(0, True), (1, True)]


def test_what_is_kept_is_given_up_in_time_and_the_next_goes_on(
    producer: Producer, fake: FakeTransactions
) -> None:
    fake.kept_ms = 20
    with producer:
        write(producer, b"1", b"2")
        until_asked(fake, 3)
        assert ends(fake)[2] == (2, False, [])
        write(producer, b"3")
        # One that has begun, and sends nothing for so long, is given up too.
        write(producer, b"4")
        before = len(ends(fake))
        producer.begin_transaction()
        until_asked(fake, before + 1)
        producer.send("a", b"5", partition=0)
        producer.commit_transaction()
    assert fake.committed("a") == [b"1", b"2", b"3", b"4", b"5"]


class Away:
    """A coordinator that gives nothing up while it is away."""

    def __init__(self, fake: FakeTransactions) -> None:
        self.is_away = True
        fake.on_ask = self._on_ask

    def _on_ask(self, what: str, request: Any) -> PenstockError | None:
        is_renewal = what == "EndTransaction" and not request.commit
        return CoordinatorNotAvailableError("it moves") if is_renewal and self.is_away else None


def test_records_wait_for_the_identity_that_follows(
    producer: Producer, fake: FakeTransactions
) -> None:
    fake.kept_ms = 20
    coordinator = Away(fake)
    with producer:
        write(producer, b"1", b"2")
        until_asked(fake, 4)
        # Empty ones in between do not go on under what is given up.
        for end in (producer.abort_transaction, producer.commit_transaction):
            producer.begin_transaction()
            end()
        producer.begin_transaction()
        sent = producer.send("a", b"3", partition=0)
        tried = len(ends(fake))
        with ThreadPoolExecutor() as pool:
            committing = pool.submit(producer.commit_transaction)
            until_asked(fake, tried + 2)
            assert not sent.done()
            coordinator.is_away = False
            committing.result(30)
    assert fake.committed("a") == [b"1", b"2", b"3"]
    assert [epoch for epoch, commit, _ in ends(fake) if commit] == [0, 1, 3]


def test_positions_wait_for_the_identity_too(producer: Producer, fake: FakeTransactions) -> None:
    fake.kept_ms = 20
    coordinator = Away(fake)
    positions = {TopicPartition("a", 0): 5}
    with producer:
        write(producer, b"1", b"2")
        until_asked(fake, 4)
        producer.begin_transaction()
        with pytest.raises(RequestTimedOutError, match="nothing was done"):
            producer.send_offsets_to_transaction(positions, GroupMetadata("g"), timeout_ms=50)
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(
                producer.send_offsets_to_transaction, positions, GroupMetadata("g")
            )
            coordinator.is_away = False
            sending.result(30)
        producer.commit_transaction()
    [offsets] = asked(fake, groups_pb2.CommitTransactionOffsetsRequest)
    assert offsets.producer_epoch == 3


def test_another_producer_is_heard_of_when_what_is_kept_is_given_up(
    producer: Producer, fake: FakeTransactions
) -> None:
    coordinator = Away(fake)
    fake.kept_ms = 20
    with producer, Producer(fake.cluster.bootstrap, transactional_id="t") as new:
        write(producer, b"1", b"2")
        until_asked(fake, 4)
        producer.begin_transaction()
        waits = producer.send("a", b"3", partition=0)
        new.init_transactions()
        coordinator.is_away = False
        with pytest.raises(ProducerFencedError):
            waits.result(30)
        with pytest.raises(ProducerFencedError):
            producer.commit_transaction()
    assert fake.committed("a") == [b"1", b"2"]


def test_a_commit_that_waits_hears_of_another_producer(
    producer: Producer, fake: FakeTransactions
) -> None:
    coordinator = Away(fake)
    fake.kept_ms = 20
    with (
        producer,
        Producer(fake.cluster.bootstrap, transactional_id="t") as new,
        ThreadPoolExecutor() as pool,
    ):
        write(producer, b"1", b"2")
        until_asked(fake, 4)
        producer.begin_transaction()
        producer.send("a", b"3", partition=0)
        tried = len(ends(fake))
        committing = pool.submit(producer.commit_transaction)
        until_asked(fake, tried + 2)
        new.init_transactions()
        coordinator.is_away = False
        with pytest.raises(ProducerFencedError):
            committing.result(30)


def test_what_is_kept_counts_from_when_the_end_was_asked_for_first(
    producer: Producer, fake: FakeTransactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("penstock.client.transactional.now_ms", lambda: clock[0])
    fake.kept_ms = LONG_MS
    with producer:
        write(producer, b"1")
        fake.on_ask = lambda what, request: "hang"
        producer.begin_transaction()
        producer.send("a", b"2", partition=0)
        with pytest.raises(RequestTimedOutError):
            producer.commit_transaction(timeout_ms=100)
        fake.on_ask = None
        clock[0] = LONG_MS + 1.0
        before = len(ends(fake))
        producer.commit_transaction()
        until_asked(fake, before + 2)
        assert ends(fake)[-1] == (2, False, [])


@pytest.mark.parametrize("trouble", ["hang", "lose"])
def test_a_close_does_not_wait_for_long_for_what_is_kept(
    make: Any, fake: FakeTransactions, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr("penstock.client.transactional._LET_GO_MS", 50)
    fake.kept_ms = LONG_MS
    fake.on_ask = lambda what, request: (
        trouble if what == "EndTransaction" and not request.commit else None
    )
    with make() as producer:
        write(producer, b"1", b"2")
    assert ends(fake)[2][:2] == (2, False)


def test_what_timed_out_meanwhile_is_given_up_like_any_other(
    make: Any, fake: FakeTransactions
) -> None:
    fake.kept_ms = LONG_MS
    with make() as producer:
        write(producer, b"1", b"2")
        fake.time_out("t")
    assert ends(fake)[2] == (2, False, [])
    assert fake.ids["t"].epoch == 3
