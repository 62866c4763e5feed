"""The end of a block of ``with producer.transaction()``, which is silent only after a commit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.client import (
    ClientClosedError,
    DeliveryFailedError,
    InvalidTxnStateError,
    ProducerFencedError,
    RecordTooLargeError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.v1 import transactions_pb2
from tests.support import wait_until
from tests.unit.client.fake_broker import FakeNode
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.test_producer import refusal
from tests.unit.client.transactional import asked, in_block


def test_a_producer_fenced_in_the_block_is_told_at_its_end(
    make: Any, fake: FakeTransactions
) -> None:
    async def refuse(_node: FakeNode, request: Any) -> Any:
        return refusal(request, ProducerFencedError("newer"))

    fake.cluster.on_produce = refuse
    with make() as producer:

        def nobody_looks_at_the_future() -> None:
            producer.send("a", b"1", partition=0)
            with pytest.raises(DeliveryFailedError):
                producer.flush()

        with pytest.raises(ProducerFencedError, match="is fenced"):
            in_block(producer, nobody_looks_at_the_future)
    assert fake.committed("a") == []


def test_a_fenced_producer_is_closed_without_another_word_about_its_records(
    make: Any, fake: FakeTransactions
) -> None:
    async def refuse(_node: FakeNode, request: Any) -> Any:
        return refusal(request, ProducerFencedError("newer"))

    fake.cluster.on_produce = refuse
    with make() as producer:
        producer.begin_transaction()
        producer.send("a", b"nobody looks at the future", partition=0)

        def is_fenced() -> bool:
            try:
                producer.send("a", b"1", partition=0)
            except ProducerFencedError:
                return True
            return False

        wait_until(is_fenced, "it hears that it is fenced")
        with pytest.raises(ProducerFencedError):
            producer.commit_transaction()
        producer.close()


def test_closing_the_producer_in_the_block_is_no_commit(make: Any, fake: FakeTransactions) -> None:
    with make() as producer:

        def close() -> None:
            producer.send("a", b"1", partition=0)
            producer.close()

        with pytest.raises(ClientClosedError, match="closed in the block"):
            in_block(producer, close)
    assert fake.committed("a") == []


def test_closing_it_after_a_commit_by_hand_is_none_either(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as producer:
        in_block(
            producer,
            lambda: producer.send("a", b"1", partition=0),
            producer.commit_transaction,
            producer.close,
        )
    assert fake.committed("a") == [b"1"]


def test_an_outcome_that_the_block_left_unknown_is_asked_for_at_its_end(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as producer:

        def commit_and_look_away() -> None:
            producer.send("a", b"1", partition=0)
            producer.flush()
            fake.on_ask = lambda what, _: "hang" if what == "EndTransaction" else None
            with pytest.raises(RequestTimedOutError, match="may be committed or not"):
                producer.commit_transaction(timeout_ms=200)
            fake.on_ask = None

        in_block(producer, commit_and_look_away)
        with pytest.raises(InvalidTxnStateError, match="nothing to commit"):
            producer.commit_transaction()
    assert fake.committed("a") == [b"1"]
    ends = asked(fake, transactions_pb2.EndTransactionRequest)
    assert {(end.producer_epoch, end.commit) for end in ends} == {(0, True)}


def test_a_block_says_that_it_has_aborted_what_could_not_be_committed(
    make: Any, fake: FakeTransactions
) -> None:
    async def refuse(_node: FakeNode, request: Any) -> Any:
        return refusal(request, RecordTooLargeError("5 bytes"))

    fake.cluster.on_produce = refuse
    with make() as producer:
        with pytest.raises(TransactionAbortableError) as raised:
            in_block(producer, lambda: producer.send("a", b"1", partition=0))
        assert raised.value.__notes__ == ["the block has aborted it: begin anew with the same work"]
        fake.cluster.on_produce = None
        in_block(producer, lambda: producer.send("a", b"1", partition=0))
    assert fake.committed("a") == [b"1"]


# --- another thread, which shares the producer ----------------------------------------------------


def elsewhere(*steps: Callable[[], object]) -> None:
    """Take the steps in another thread."""
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            pool.submit(step).result(15)


@pytest.mark.parametrize("commit", [True, False])
def test_a_block_whose_transaction_another_thread_ended_says_nothing(
    make: Any, fake: FakeTransactions, commit: bool
) -> None:
    with make() as producer:
        in_block(
            producer,
            lambda: producer.send("a", b"1", partition=0),
            lambda: elsewhere(
                producer.commit_transaction if commit else producer.abort_transaction
            ),
        )
        in_block(producer, lambda: producer.send("a", b"2", partition=0))
    assert fake.committed("a") == ([b"1", b"2"] if commit else [b"2"])


def test_a_block_commits_what_another_thread_has_begun_since(
    make: Any, fake: FakeTransactions
) -> None:
    with make() as producer:
        in_block(
            producer,
            lambda: producer.send("a", b"1", partition=0),
            lambda: elsewhere(
                producer.abort_transaction,
                producer.begin_transaction,
                lambda: producer.send("a", b"2", partition=0),
            ),
        )
        with pytest.raises(InvalidTxnStateError, match="nothing to commit"):
            elsewhere(producer.commit_transaction)
    assert fake.committed("a") == [b"2"]


def test_a_block_that_raises_aborts_what_another_thread_has_begun_since(
    make: Any, fake: FakeTransactions
) -> None:
    def fail() -> None:
        raise KeyError("the work")

    with make() as producer:
        with pytest.raises(KeyError):
            in_block(
                producer,
                lambda: producer.send("a", b"1", partition=0),
                lambda: elsewhere(
                    producer.commit_transaction,
                    producer.begin_transaction,
                    lambda: producer.send("a", b"2", partition=0),
                ),
                fail,
            )
        with pytest.raises(InvalidTxnStateError, match="nothing to commit"):
            elsewhere(producer.commit_transaction)
    assert fake.committed("a") == [b"1"]
