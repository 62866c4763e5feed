"""Positions of groups in transactions: who sends them, and who waits for their end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import (
    Consumer,
    GroupMetadata,
    InvalidGroupIdError,
    InvalidTxnStateError,
    OffsetAndMetadata,
    TopicPartition,
    TransactionAbortableError,
)
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    FencedMemberEpochError,
    PenstockError,
    UnstableOffsetCommitError,
)
from tests.support import wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.transactional import asked, in_block


def test_positions_are_the_groups_with_the_commit(make: Any, fake: FakeTransactions) -> None:
    name = TopicPartition("a", 1)
    group = fake.cluster.groups["g"]
    with make() as producer:
        producer.begin_transaction()
        producer.send("b", b"1")
        producer.send_offsets_to_transaction({name: 7}, GroupMetadata("g", "m", 4))
        assert not group.offsets
        producer.commit_transaction()
        assert group.offsets[name].offset == 7
        [request] = asked(fake, groups_pb2.CommitTransactionOffsetsRequest)
        commit = request.commit
        assert (commit.group_id, commit.member_id, commit.member_epoch) == ("g", "m", 4)
        assert (request.transactional_id, request.producer_epoch) == ("t", 0)
        producer.begin_transaction()
        producer.send_offsets_to_transaction({name: OffsetAndMetadata(9)}, GroupMetadata("g"))
        producer.abort_transaction()
        assert group.offsets[name].offset == 7
        producer.begin_transaction()
        producer.send_offsets_to_transaction({name: 8}, GroupMetadata("g"))  # And no record.
        producer.commit_transaction()
        assert group.offsets[name].offset == 8


def test_positions_that_the_group_refuses_spoil_the_transaction(
    make: Any, fake: FakeTransactions
) -> None:
    fake.on_ask = lambda what, request: (
        FencedMemberEpochError("taken away") if "Offsets" in what else None
    )
    with make() as producer:
        with pytest.raises(TransactionAbortableError, match="taken away") as raised:
            in_block(
                producer,
                lambda: producer.send("a", b"1", partition=0),
                lambda: producer.send_offsets_to_transaction(
                    {TopicPartition("b", 0): 1}, GroupMetadata("g", "m", 4)
                ),
            )
        assert isinstance(raised.value.__cause__, FencedMemberEpochError)
        with pytest.raises(InvalidTxnStateError, match="begin_transaction"):
            producer.send_offsets_to_transaction(
                {TopicPartition("b", 0): 1}, GroupMetadata("g", "m", 4)
            )
    assert fake.committed("a") == []


def test_a_consumer_says_who_it_is_in_its_group(background: Background) -> None:
    background.cluster.add_topic("a")
    with Consumer(background.cluster.bootstrap, group_id="g", topics="a") as consumer:
        assert consumer.group_metadata() == GroupMetadata("g")
        consumer.poll(500)
        [member] = background.cluster.groups["g"].members.values()
        found = consumer.group_metadata()
        assert (found.member_id, found.member_epoch) == (member.member_id, member.epoch)
    with (
        Consumer(background.cluster.bootstrap) as loner,
        pytest.raises(InvalidGroupIdError, match="no group_id"),
    ):
        loner.group_metadata()


def test_positions_of_an_open_transaction_are_waited_for(background: Background) -> None:
    background.cluster.add_topic("a")
    requests: list[groups_pb2.FetchOffsetsRequest] = []

    def unstable(request: groups_pb2.FetchOffsetsRequest) -> PenstockError | None:
        requests.append(request)
        return UnstableOffsetCommitError("one is open") if len(requests) < 3 else None

    background.cluster.on_fetch_offsets = unstable
    with Consumer(background.cluster.bootstrap, group_id="g", retry_backoff_ms=10) as consumer:
        assert consumer.committed(TopicPartition("a", 0)) == {TopicPartition("a", 0): None}
    assert len(requests) == 3
    assert all(request.require_stable for request in requests)


def test_a_member_that_the_group_gave_up_is_told_so_before_it_commits(
    background: Background,
) -> None:
    background.cluster.add_topic("a")
    with Consumer(background.cluster.bootstrap, group_id="g", topics="a") as consumer:
        wait_until(lambda: bool(consumer.poll(50)) or bool(consumer.assignment()), "it has some")
        background.run(background.cluster.groups["g"].members.clear)

        def refused() -> bool:
            try:
                consumer.group_metadata()
            except FencedMemberEpochError:
                return True
            return False

        # It joins anew by itself, and has an epoch again; but it has not heard what it lost.
        wait_until(refused, "it may not commit")
        wait_until(lambda: bool(background.cluster.groups["g"].members), "it joined again")
        assert refused()
