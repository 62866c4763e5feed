"""What is too large to be written is refused before it is decided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import AddPartitions
from penstock.broker.core.transaction_values import (
    GroupCommit,
    Identity,
    Participant,
    State,
    Transaction,
    Winner,
)
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicId
from tests.unit.transactions.transaction_harness import ID, A, Driver, code, identity_of

RECORD_BYTES = 8 * 1024 * 1024  # The max.message.bytes of __transaction_state.
NAME = "t" * 249
TOPIC_ID = TopicId(b"t" * 16)
FITTING = 4 * 1024 * 1024 // (249 + 40)  # So many partitions of a topic of this name.


def add(d: Driver, identity: Identity, first: int, count: int) -> ErrorCode | None:
    """Ask for partitions of a topic whose name is as long as can be."""
    d.topics.ids[NAME] = TOPIC_ID
    request = coordination_pb2.AddPartitionsEntry(
        transactional_id=ID,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        partitions=[
            common_pb2.TopicPartition(topic=NAME, partition=number, topic_id=TOPIC_ID)
            for number in range(first, first + count)
        ],
    )
    number = 1_000_000 + first + count
    d.handle(AddPartitions(number, request, d.now_ms + 10_000))
    return code(d.answer(number))


def test_more_partitions_than_a_record_holds_are_refused_before_they_are_in() -> None:
    d = Driver()
    identity = identity_of(d.init())
    assert add(d, identity, 0, FITTING - 1) is None
    written = len(d.log)
    assert add(d, identity, FITTING - 1, 2) is ErrorCode.INVALID_REQUEST
    assert len(d.log) == written
    assert len(d.describe().partitions) == FITTING - 1
    assert add(d, identity, FITTING - 1, 1) is None
    kept = [f"{NAME}-{number}" for number in range(FITTING)]
    assert code(d.end(identity, commit=True, keep=kept)) is None
    largest = max(len(change.key) + len(change.value or b"") for change in d.log)
    assert RECORD_BYTES // 4 < largest < RECORD_BYTES // 2


@given(
    st.sets(
        st.builds(
            Participant,
            st.binary(min_size=16, max_size=16).map(TopicId),
            st.integers(0, 2**31 - 1),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=249),
        ),
        max_size=8,
    ),
)
def test_partitions_take_no_more_than_is_said(partitions: set[Participant]) -> None:
    def record(of: frozenset[Participant]) -> int:
        value = Transaction(State.PREPARE_ABORT, 1, 2, 3, 4, A, partitions=of)
        return len(transaction_codec.id_value(value))

    # A packed index takes five bytes at most; those of a few partitions are small.
    kept_bytes = 5 * len(partitions)
    grown = record(frozenset(partitions)) - record(frozenset()) + kept_bytes
    assert grown <= transaction_codec.partitions_bytes(partitions)


def test_the_record_of_as_many_winners_as_are_allowed_is_small() -> None:
    d = Driver()
    winners = [Winner(2**31 - 1 - task, 2**63 - 1, 2**63 - 1 - task) for task in range(10_001)]
    value = GroupCommit(2**63 - 1, tuple(winners[:-1]), 2**63 - 1)
    assert len(transaction_codec.group_value(value)) < RECORD_BYTES // 16
    assert code(d.commit_group(1, *winners)) is ErrorCode.INVALID_REQUEST
    assert code(d.commit_group(1, *winners[:-1])) is ErrorCode.UNKNOWN_ATTEMPT
