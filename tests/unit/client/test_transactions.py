"""Transactions of both producers, against brokers that can be told to misbehave."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from penstock.client import (
    AsyncProducer,
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTxnStateError,
    NotEnoughReplicasError,
    Producer,
    ProducerFencedError,
    RecordTooLargeError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.v1 import metadata_pb2, transactions_pb2
from penstock.wire.errors import (
    ConcurrentTransactionsError,
    InvalidTransactionTimeoutError,
    PenstockError,
    UnknownProducerIdError,
)
from penstock.wire.records import parse_header
from tests.support import eventually, wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.test_producer import refusal
from tests.unit.client.transactional import Sync, asked, in_block


def test_what_is_committed_is_there_and_what_is_aborted_is_not(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as producer:
        for number in range(3):
            producer.begin_transaction()
            producer.send("a", b"%d" % number, partition=number % 2)
            producer.send("b", b"%d" % number)
            if number == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    assert (fake.committed("a"), fake.committed("a", 1)) == ([b"0", b"2"], [])
    assert fake.committed("b") == [b"0", b"2"]
    ends = asked(fake, transactions_pb2.EndTransactionRequest)
    assert [(end.producer_epoch, end.commit) for end in ends] == [(0, True), (1, False), (2, True)]
    for _, _, data in fake.cluster.partition("b").batches:
        header = parse_header(data)
        assert header.is_transactional
        assert header.base_sequence == 0  # Numbered from 0 in each transaction.
    for _, request in fake.cluster.produced:
        assert request.transactional_id == "t"


def test_a_block_commits_or_aborts(make: Any, fake: FakeTransactions) -> None:
    with make() as producer:
        with producer.transaction():
            producer.send("a", b"1", partition=0)
        with pytest.raises(ZeroDivisionError):
            in_block(producer, lambda: producer.send("a", b"2", partition=0), lambda: 1 // 0)
        with producer.transaction():
            producer.send("a", b"3", partition=0)
        with producer.transaction():
            producer.send("a", b"4", partition=0)
            producer.abort_transaction()
        with producer.transaction():
            producer.send("a", b"5", partition=0)
    assert fake.committed("a") == [b"1", b"3", b"5"]


def test_steps_out_of_turn_are_refused_and_change_nothing(
    make: Any, fake: FakeTransactions
) -> None:
    with make(None) as plain:
        for step in (plain.begin_transaction, plain.commit_transaction, plain.init_transactions):
            with pytest.raises(InvalidTxnStateError, match="with a transactional_id"):
                step()
    with make() as producer:
        with pytest.raises(InvalidTxnStateError, match=r"next: begin_transaction\(\)"):
            producer.send("a", b"0")
        with pytest.raises(InvalidTxnStateError, match=r"next: begin_transaction\(\)"):
            producer.send("no-such-topic", b"0")
        with pytest.raises(InvalidTxnStateError, match="nothing to commit"):
            producer.commit_transaction()
        producer.init_transactions()
        with pytest.raises(InvalidTxnStateError, match="nothing to abort"):
            producer.abort_transaction()
        with pytest.raises(InvalidTxnStateError, match=r"next: begin_transaction\(\)"):
            producer.send_many("a", [b"0"])
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        with pytest.raises(InvalidTxnStateError, match="a transaction is open; next: commit"):
            producer.begin_transaction()
        producer.commit_transaction()
        # The way of plain records past all checks is closed as well.
        with pytest.raises(InvalidTxnStateError, match=r"next: begin_transaction\(\)"):
            producer.send("a", b"2", partition=0)
        with pytest.raises(InvalidRequestError, match=r"group_metadata\(\) returns"):
            producer.send_offsets_to_transaction({}, "group")
    assert fake.committed("a") == [b"1"]


def test_the_coordinator_alone_gives_identities(
    make: Any, fake: FakeTransactions, background: Background
) -> None:
    kinds: list[int] = []
    fake.cluster.on_find_coordinator = lambda request: kinds.append(request.type)
    before = fake.cluster.next_producer_id
    with make() as producer:
        producer.partitions_for("a")
        background.run(lambda: None)
        with producer.transaction():
            producer.send("a", b"1", partition=0)
    assert fake.cluster.next_producer_id == before + 1
    assert set(kinds) == {metadata_pb2.COORDINATOR_TYPE_TRANSACTION}


def test_a_transaction_of_nothing_asks_nobody(make: Any, fake: FakeTransactions) -> None:
    with make() as producer:
        producer.init_transactions()
        before = len(fake.asked)
        with producer.transaction():
            pass
        producer.begin_transaction()
        producer.abort_transaction()
    assert len(fake.asked) == before


def test_the_newest_producer_of_an_id_fences_the_older(make: Any, fake: FakeTransactions) -> None:
    with make() as old, make() as new:
        old.begin_transaction()
        old.send("a", b"old", partition=0)
        old.flush()
        new.begin_transaction()
        new.send("a", b"new", partition=0)
        with pytest.raises(ProducerFencedError, match="another producer of this transactional id"):
            old.commit_transaction()
        for step in (old.begin_transaction, old.abort_transaction, old.init_transactions):
            with pytest.raises(ProducerFencedError):
                step()
        with pytest.raises(ProducerFencedError):
            old.send("a", b"old")
        new.commit_transaction()
    assert fake.committed("a") == [b"new"]


def test_a_fenced_producer_hears_so_where_leaders_only_know_a_newer_epoch(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as old, make() as new:
        with pytest.raises(ProducerFencedError) as raised:
            in_block(
                old,
                lambda: old.send("a", b"old", partition=0),
                old.flush,
                new.init_transactions,
                lambda: old.send("b", b"old"),
            )
        assert raised.value.__cause__ is not None
        with new.transaction():
            new.send("a", b"new", partition=0)
    assert (fake.committed("a"), fake.committed("b")) == ([b"new"], [])


@pytest.mark.parametrize("flushed", [False, True])
def test_a_timeout_of_the_cluster_is_abortable_and_the_next_one_works(
    make: Any, fake: FakeTransactions, flushed: bool, background: Background
) -> None:
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        producer.flush()
        background.run(lambda: fake.time_out("t"))
        if flushed:
            producer.send("a", b"2", partition=0)  # Refused for its epoch.
        with pytest.raises(TransactionAbortableError, match=r"timed out|took longer than"):
            producer.commit_transaction()
        with pytest.raises(TransactionAbortableError):
            producer.send("a", b"3", partition=0)
        producer.abort_transaction()
        with producer.transaction():
            producer.send("a", b"4", partition=0)
    assert fake.committed("a") == [b"4"]


def test_one_record_that_fails_is_the_end_of_its_transaction(
    make: Any, fake: FakeTransactions
) -> None:
    async def refuse(node: Any, request: Any) -> Any:
        if b"bad" in request.partitions[0].records:
            return refusal(request, RecordTooLargeError("too large for the topic"))
        return None

    fake.cluster.on_produce = refuse
    with make() as producer:
        with pytest.raises(TransactionAbortableError, match="too large for the topic") as raised:
            in_block(
                producer,
                lambda: producer.send("a", b"good", partition=0),
                lambda: producer.send("b", b"bad"),
            )
        assert isinstance(raised.value.__cause__, RecordTooLargeError)
        with producer.transaction():
            producer.send("b", b"fine")
    assert (fake.committed("a"), fake.committed("b")) == ([], [b"fine"])


def test_a_gap_spoils_the_transaction_and_raises_no_epoch(
    make: Any, fake: FakeTransactions
) -> None:
    times = 0

    async def forget(node: Any, request: Any) -> Any:
        nonlocal times
        times += 1
        return refusal(request, UnknownProducerIdError("forgotten")) if times == 2 else None

    fake.cluster.on_produce = forget
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        producer.flush()
        producer.send("a", b"2", partition=0)
        with pytest.raises(TransactionAbortableError, match="forgotten"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send("a", b"3", partition=0)
    assert fake.committed("a") == [b"3"]
    epochs = {
        parse_header(entry.records).producer_epoch
        for _, request in fake.cluster.produced
        for entry in request.partitions
    }
    assert epochs == {0, 1}


def test_an_abort_gives_up_what_is_on_its_way(make: Any, fake: FakeTransactions) -> None:
    held: list[Any] = []

    async def hold(node: Any, request: Any) -> Any:
        if b"held" in request.partitions[0].records:
            held.append(request)
            return "drop"
        return None

    fake.cluster.on_produce = hold
    with make() as producer:
        producer.begin_transaction()
        future = producer.send("a", b"held", partition=0)
        wait_until(lambda: _turn(producer) or bool(held), "it is on its way")
        producer.abort_transaction()
        with pytest.raises(TransactionAbortableError, match="was aborted"):
            future.result(10) if isinstance(producer, Producer) else future.result()
        with producer.transaction():
            producer.send("a", b"next", partition=0)
    assert fake.committed("a") == [b"next"]


def _turn(producer: Any) -> bool:
    """Let an asyncio producer's loop run."""
    if isinstance(producer, Sync):
        pause = asyncio.sleep(0.01)  # Its loop runs only while it is run.
        producer._loop.run_until_complete(pause)
    return False


@pytest.mark.parametrize("decided", [True, False])
def test_an_end_without_an_answer_is_asked_for_again_and_decides_once(
    make: Any, fake: FakeTransactions, decided: bool
) -> None:
    tries = 0

    def lose(what: str, request: Any) -> PenstockError | str | None:
        nonlocal tries
        if what != "EndTransaction":
            return None
        tries += 1
        if tries > 2:
            return None
        return "lose" if decided else ConcurrentTransactionsError("marks are on their way")

    fake.on_ask = lose
    with make() as producer:
        with producer.transaction():
            producer.send("a", b"1", partition=0)
        assert tries == 3
        with producer.transaction():
            producer.send("a", b"2", partition=0)
    assert fake.committed("a") == [b"1", b"2"]


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("again", ["commit", "abort"])
def test_an_unknown_outcome_is_told_as_such_and_can_be_asked_for_again(
    make: Any, fake: FakeTransactions, decided: bool, again: str
) -> None:
    def lose(what: str, request: Any) -> PenstockError | str | None:
        if what != "EndTransaction":
            return None
        return "lose" if decided else ConcurrentTransactionsError("marks are on their way")

    fake.on_ask = lose
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        with pytest.raises(RequestTimedOutError, match=r"call commit_transaction\(\) again"):
            producer.commit_transaction(timeout_ms=2_000)
        with pytest.raises(InvalidTxnStateError, match="is not known yet"):
            producer.begin_transaction()
        fake.on_ask = None
        if again == "commit":
            producer.commit_transaction()
        elif decided:
            with pytest.raises(InvalidTxnStateError, match="it is committed"):
                producer.abort_transaction()
        else:
            producer.abort_transaction()
        with producer.transaction():
            producer.send("a", b"2", partition=0)
    first = [b"1"] if again == "commit" or decided else []
    assert fake.committed("a") == [*first, b"2"]


def test_a_commit_whose_flush_takes_too_long_has_decided_nothing(
    make: Any, fake: FakeTransactions
) -> None:
    async def refuse(node: Any, request: Any) -> Any:
        return refusal(request, NotEnoughReplicasError("too few"))

    fake.cluster.on_produce = refuse
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        with pytest.raises(RequestTimedOutError, match="stays queued; next: make the") as raised:
            producer.commit_transaction(timeout_ms=100)
        assert raised.value.message.startswith("nothing is decided about the transaction of 't'")
        assert not asked(fake, transactions_pb2.EndTransactionRequest)
        fake.cluster.on_produce = None
        producer.send("a", b"2", partition=0)
        producer.commit_transaction()
    assert fake.committed("a") == [b"1", b"2"]


def test_an_identity_is_asked_for_once_however_often_its_answer_is_lost(
    make: Any, fake: FakeTransactions
) -> None:
    losses = iter(["lose", "lose"])
    fake.on_ask = lambda what, request: next(losses, None) if "Init" in what else None
    with make() as producer, producer.transaction():
        producer.send("a", b"1", partition=0)
    fake.on_ask = lambda what, request: ConcurrentTransactionsError("not yet")
    with make("other", retry_backoff_ms=60_000, retry_backoff_max_ms=60_000) as producer:
        for _ in range(2):  # The pause before a repetition is longer than the call's time.
            with pytest.raises(ConcurrentTransactionsError):
                producer.init_transactions(timeout_ms=10_000)
    everybody = asked(fake, transactions_pb2.InitProducerIdRequest)
    requests = [request for request in everybody if request.transactional_id == "t"]
    others = [request.instance_id for request in everybody if request.transactional_id != "t"]
    assert len(others) == 2
    assert len(set(others) | {requests[0].instance_id}) == 2
    assert len(requests) == 3
    assert len({request.instance_id for request in requests}) == 1
    assert len(requests[0].instance_id) == 16
    assert requests[0].transaction_timeout_ms == 60_000
    assert fake.committed("a") == [b"1"]


def test_what_brokers_do_not_allow_is_said_by_the_first_begin(
    make: Any, fake: FakeTransactions
) -> None:
    fake.on_ask = lambda what, request: InvalidTransactionTimeoutError("900000 at most")
    with make(transaction_timeout_ms=10**6) as producer:
        with pytest.raises(InvalidTransactionTimeoutError, match="900000 at most"):
            producer.begin_transaction()
        fake.on_ask = None
        producer.begin_transaction()
        producer.abort_transaction()


def test_closing_aborts_what_is_open_and_says_so(
    make: Any, fake: FakeTransactions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.client"), make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        producer.flush()
    assert "closed with a transaction open" in caplog.text
    [end] = asked(fake, transactions_pb2.EndTransactionRequest)
    assert not end.commit
    assert fake.committed("a") == []


def test_a_send_that_waits_for_room_hears_of_the_end_of_its_transaction(
    background: Background, fake: FakeTransactions
) -> None:
    background.cluster.add_topic("a")
    reached = threading.Event()

    async def hold(node: Any, request: Any) -> Any:
        reached.set()
        return "drop"

    fake.cluster.on_produce = hold
    raised: list[BaseException] = []
    with Producer(
        background.cluster.bootstrap, transactional_id="t", linger_ms=0, buffer_memory=2_000
    ) as producer:
        producer.begin_transaction()
        producer.send("a", b"x" * 1_500)
        assert reached.wait(10)

        def send() -> None:
            try:
                producer.send("a", b"y" * 1_500)
            except InvalidTxnStateError as error:
                raised.append(error)

        waiting = threading.Thread(target=send)
        waiting.start()
        wait_until(lambda: producer._engine.accumulator._starved, "it waits for room")
        producer.abort_transaction()
        waiting.join(10)
        assert not waiting.is_alive()
        assert len(raised) == 1


def test_a_commit_during_which_the_producer_is_closed_has_an_unknown_outcome(
    background: Background, fake: FakeTransactions
) -> None:
    background.cluster.add_topic("a")
    fake.on_ask = lambda what, request: (
        ConcurrentTransactionsError("not yet") if what == "EndTransaction" else None
    )
    raised: list[BaseException] = []
    producer = Producer(background.cluster.bootstrap, transactional_id="t")
    producer.begin_transaction()
    producer.send("a", b"1")

    def commit() -> None:
        try:
            producer.commit_transaction()
        except RequestTimedOutError as error:
            raised.append(error)

    committing = threading.Thread(target=commit)
    committing.start()
    wait_until(lambda: bool(asked(fake, transactions_pb2.EndTransactionRequest)), "it is asked")
    producer.close(0)
    committing.join(20)
    assert not committing.is_alive()
    assert "may be committed or not" in str(raised[0])


async def test_a_commit_that_waits_for_its_answer_while_all_is_closed_is_no_cancelled_one(
    background: Background,
) -> None:
    background.cluster.add_topic("a")
    fake = background.cluster.transactions
    fake.on_ask = lambda what, request: "hang" if what == "EndTransaction" else None
    producer = AsyncProducer(background.cluster.bootstrap, transactional_id="t")
    await producer.begin_transaction()
    await producer.send("a", b"1")
    commit = asyncio.ensure_future(producer.commit_transaction())
    await eventually(lambda: bool(asked(fake, transactions_pb2.EndTransactionRequest)))
    await producer.close(0)
    with pytest.raises(RequestTimedOutError, match="may be committed or not"):
        await commit


async def test_a_commit_that_is_cancelled_can_be_asked_for_again(background: Background) -> None:
    background.cluster.add_topic("a")
    fake = background.cluster.transactions
    fake.on_ask = lambda what, request: (
        ConcurrentTransactionsError("not yet") if what == "EndTransaction" else None
    )
    async with AsyncProducer(background.cluster.bootstrap, transactional_id="t") as producer:
        await producer.begin_transaction()
        await producer.send("a", b"1")
        commit = asyncio.ensure_future(producer.commit_transaction())
        await eventually(lambda: bool(asked(fake, transactions_pb2.EndTransactionRequest)))
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        with pytest.raises(InvalidTxnStateError, match=r"commit_transaction\(\) again"):
            await producer.begin_transaction()
        fake.on_ask = None
        await producer.commit_transaction()
    assert fake.committed("a") == [b"1"]


def test_the_leaders_own_fencing_is_not_taken_for_a_coordinators(
    make: Any, fake: FakeTransactions
) -> None:
    """It may be a marker's, of a transaction that timed out: only the coordinator can tell."""

    async def refuse(node: Any, request: Any) -> Any:
        return refusal(request, InvalidProducerEpochError("there is a newer one"))

    fake.cluster.on_produce = refuse
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"1", partition=0)
        with pytest.raises(TransactionAbortableError, match="there is a newer one"):
            producer.commit_transaction()
        [end] = asked(fake, transactions_pb2.EndTransactionRequest)
        assert not end.commit
        fake.cluster.on_produce = None
        producer.abort_transaction()  # It is aborted already.
        assert len(asked(fake, transactions_pb2.EndTransactionRequest)) == 1
        with producer.transaction():
            producer.send("a", b"2", partition=0)
    assert fake.committed("a") == [b"2"]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_topic_that_is_made_anew_spoils_the_transaction_that_wrote_to_it(
    make: Any, fake: FakeTransactions, background: Background, partitions: int
) -> None:
    with make(metadata_max_age_ms=100) as producer:
        producer.begin_transaction()
        producer.send("b", b"1")
        producer.flush()
        background.run(lambda: fake.cluster.delete_topic("b"))
        background.run(lambda: fake.cluster.add_topic("b", partitions))

        def is_spoiled() -> bool:
            _turn(producer)
            try:
                producer.send("a", b"2", partition=0)
            except TransactionAbortableError as error:
                return "may have been made anew" in str(error)
            return False

        wait_until(is_spoiled, "it hears that the topic is another one")
        with pytest.raises(TransactionAbortableError, match="made anew"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send("b", b"3")
    assert fake.committed("a") == []
    assert [*fake.committed("b"), *(fake.committed("b", 1) if partitions == 2 else [])] == [b"3"]
