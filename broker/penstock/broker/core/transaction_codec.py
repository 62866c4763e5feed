"""The records of ``__transaction_state``: values to bytes and back.

Keys are equal exactly when their bytes are, which compaction relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.broker.core.transaction_values import (
    UNKNOWN_PRODUCER,
    Cause,
    GroupCommit,
    Identity,
    Participant,
    Participants,
    State,
    Transaction,
    Winner,
)
from penstock.v1 import common_pb2, transaction_records_pb2, transactions_pb2
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicId
from penstock.wire.transactional_ids import parse_attempt

_PARTITION_BYTES: Final = 40
"""What a partition takes at most beside its topic's name: id, number, what goes before each field,
and its index where it is kept."""

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class ReplayedId:
    """A record about a transactional id or an attempt."""

    transactional_id: str
    value: Transaction | None


@dataclass(frozen=True, slots=True)
class ReplayedGroup:
    """A record about a group of attempts."""

    group: str
    value: GroupCommit | None


def id_key(transactional_id: str) -> bytes:
    """The key of a transactional id."""
    key = transaction_records_pb2.TransactionRecordKey(transactional_id=transactional_id)
    return key.SerializeToString(deterministic=True)


def group_key(group: str) -> bytes:
    """The key of a group of attempts."""
    key = transaction_records_pb2.TransactionRecordKey(group=group)
    return key.SerializeToString(deterministic=True)


def id_value(value: Transaction) -> bytes:
    """A transactional id."""
    partitions = sorted(value.partitions)
    return transaction_records_pb2.TransactionValue(
        state=value.state.value,  # type: ignore[arg-type]  # The same numbers.
        producer_id=value.producer_id,
        producer_epoch=value.epoch,
        last_producer_id=value.last.producer_id,
        last_producer_epoch=value.last.epoch,
        last_committed=value.last_committed,
        last_cause=value.last_cause.value,  # type: ignore[arg-type]  # As above.
        transaction_timeout_ms=value.timeout_ms,
        start_ms=value.start_ms,
        updated_ms=value.updated_ms,
        partitions=topic_partitions(partitions),
        instance_id=value.instance_id,
        next_producer_id=value.next_producer_id,
        superseded_instance_ids=value.superseded,
        kept=indexes(partitions, value.kept),
        lapsed=value.lapsed,
        carried=indexes(partitions, value.carried),
    ).SerializeToString()


def group_value(value: GroupCommit) -> bytes:
    """A group's last commit."""
    return transaction_records_pb2.GroupCommitValue(
        epoch_number=value.epoch_number,
        winners=map(winner_proto, value.winners),
        committed_ms=value.committed_ms,
        ends_group=value.ends_group,
        metadata=value.metadata,
    ).SerializeToString()


def winner_proto(winner: Winner) -> transactions_pb2.Winner:
    """A winner as it goes over the wire."""
    return transactions_pb2.Winner(
        task=winner.task, attempt=winner.attempt, producer_id=winner.producer_id
    )


def winner(message: transactions_pb2.Winner) -> Winner:
    """A winner as it came over the wire."""
    return Winner(message.task, message.attempt, message.producer_id)


def topic_partitions(participants: Iterable[Participant]) -> list[common_pb2.TopicPartition]:
    """Participants as they go over the wire, in order."""
    return [
        common_pb2.TopicPartition(topic=topic, partition=partition, topic_id=topic_id)
        for topic_id, partition, topic in sorted(participants)
    ]


def indexes(partitions: Sequence[Participant], some: Participants) -> list[int]:
    """Where some of the partitions are among them, as records and marks name what is kept."""
    return [at for at, one in enumerate(partitions) if one in some] if some else []


def partitions_bytes(participants: Iterable[Participant]) -> int:
    """How many bytes partitions take in a record, at most."""
    return sum(len(one.topic.encode()) + _PARTITION_BYTES for one in participants)


def participant(partition: common_pb2.TopicPartition) -> Participant:
    """A participant as it came over the wire."""
    return Participant(TopicId(partition.topic_id), partition.partition, partition.topic)


def decode(key: bytes, value: bytes | None) -> ReplayedId | ReplayedGroup | None:
    """What a record says; None for a kind that this version does not know.

    Raises CorruptRecordError when the bytes are not what they should be.
    """
    record_key = _parse(transaction_records_pb2.TransactionRecordKey, key)
    match record_key.WhichOneof("key"):
        case "transactional_id":
            return ReplayedId(record_key.transactional_id, None if value is None else _id(value))
        case "group":
            return ReplayedGroup(record_key.group, None if value is None else _group(value))
        case _:
            return None


def _id(value: bytes) -> Transaction:
    stored = _parse(transaction_records_pb2.TransactionValue, value)
    try:
        state, cause = State(stored.state), Cause(stored.last_cause)
    except ValueError as error:
        raise CorruptRecordError(f"a transaction's record says {error}") from None
    partitions = [participant(partition) for partition in stored.partitions]
    for what, indexes_ in (("kept", stored.kept), ("carried", stored.carried)):
        if not all(0 <= at < len(partitions) for at in indexes_):
            raise CorruptRecordError(f"of {len(partitions)} partitions {list(indexes_)} are {what}")
    return Transaction(
        state=state,
        producer_id=stored.producer_id,
        epoch=stored.producer_epoch,
        timeout_ms=stored.transaction_timeout_ms,
        updated_ms=stored.updated_ms,
        instance_id=stored.instance_id,
        last=Identity(stored.last_producer_id, stored.last_producer_epoch),
        last_committed=stored.last_committed,
        last_cause=cause,
        start_ms=stored.start_ms,
        partitions=frozenset(partitions),
        next_producer_id=stored.next_producer_id,
        superseded=tuple(stored.superseded_instance_ids),
        kept=frozenset(partitions[at] for at in stored.kept),
        lapsed=stored.lapsed,
        carried=frozenset(partitions[at] for at in stored.carried),
    )


def _group(value: bytes) -> GroupCommit:
    stored = _parse(transaction_records_pb2.GroupCommitValue, value)
    winners = *map(_winner_by_id, stored.winner_ids), *map(winner, stored.winners)
    return GroupCommit(
        stored.epoch_number, winners, stored.committed_ms, stored.ends_group, stored.metadata
    )


def _winner_by_id(transactional_id: str) -> Winner:
    attempt = parse_attempt(transactional_id)
    if attempt is None:
        raise CorruptRecordError(f"a group's commit is for {transactional_id!r}, no attempt's id")
    return Winner(attempt.task, attempt.attempt, UNKNOWN_PRODUCER)


def _parse(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise CorruptRecordError(
            f"a record of {len(data)} bytes is no {kind.DESCRIPTOR.name}; the log holds what no "
            "transaction coordinator wrote"
        ) from None
    return message
