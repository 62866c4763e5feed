"""What the committed logs of a run say of transactions, put beside what clients were told."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.chaos.simulator.history import CommittedLog, check
from penstock.chaos.simulator.transactions.anomalies import Anomaly
from penstock.chaos.simulator.transactions.history import (
    Decided,
    GroupDecided,
    History,
    Identity,
    Kind,
    LoggedBatch,
    Taken,
)
from penstock.v1 import transaction_records_pb2, transactions_pb2
from penstock.wire.ids import TopicIdPartition
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import decode_batch, parse_header
from penstock.wire.transactional_ids import Attempt, AttemptHandle

_DECIDED = {
    transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT: True,
    transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT: False,
}


def logged_batch(data: bytes) -> LoggedBatch:
    """What a batch of a log says of transactions."""
    header = parse_header(data)
    identity = Identity(header.producer_id, header.producer_epoch)
    values: tuple[bytes, ...] = ()
    if header.is_control:
        kind = Kind.COMMIT if marker_type(data) is MarkerType.COMMIT else Kind.ABORT
    else:
        kind = Kind.DATA if header.is_transactional else Kind.PLAIN
        values = tuple(bytes(record.value or b"") for record in decode_batch(data))
    return LoggedBatch(header.base_offset, header.next_offset, identity, kind, values)


def _handles(group: str, commit: transaction_records_pb2.GroupCommitValue) -> tuple[str, ...]:
    """As drivers have them who won."""
    number = commit.epoch_number
    return tuple(
        AttemptHandle(Attempt(group, number, won.task, won.attempt), won.producer_id).text
        for won in commit.winners
    )


@dataclass(slots=True)
class _Stable:
    """The last stable offset after each batch of a log."""

    ends: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)

    def add(self, batch: LoggedBatch) -> None:
        if batch.kind is Kind.DATA:
            self.open.setdefault(batch.identity.producer_id, batch.base_offset)
        elif batch.kind is not Kind.PLAIN:
            self.open.pop(batch.identity.producer_id, None)
        self.ends.append(batch.next_offset)
        self.offsets.append(min(self.open.values(), default=batch.next_offset))

    def at(self, high_watermark: int) -> int:
        """As anomalies.last_stable_offset."""
        place = bisect_right(self.ends, high_watermark) - 1
        if place < 0:
            return high_watermark
        offset = self.offsets[place]
        return high_watermark if offset == self.ends[place] else offset


class Observer:
    """Puts into the history what coordinators decide, and judges it.

    ``committed``: the log of a partition as it was ever shown as committed. ``is_coordinators``:
    whether a partition is of the coordinators' topic.
    """

    def __init__(
        self,
        history: History,
        committed: Callable[[TopicIdPartition], CommittedLog],
        is_coordinators: Callable[[TopicIdPartition], bool],
    ) -> None:
        self.history = history
        self.logs: dict[TopicIdPartition, list[LoggedBatch]] = {}
        self.decided = 0
        self._committed = committed
        self.is_coordinators = is_coordinators
        self._stable: dict[TopicIdPartition, _Stable] = {}
        self._read: dict[TopicIdPartition, int] = {}  # How many batches were looked at.
        self._led: dict[tuple[TopicIdPartition, int], int] = {}
        self._instances: dict[str, bytes] = {}  # By transactional id, who has it.

    def look(self, key: TopicIdPartition) -> None:
        """See what was committed of a partition since."""
        batches = self._committed(key).batches
        seen = self._read.get(key, 0)
        if len(batches) == seen:
            return
        self._read[key] = len(batches)
        for data in batches[seen:]:
            if self.is_coordinators(key):
                self._decisions(data)
            else:
                batch = logged_batch(data)
                self.logs.setdefault(key, []).append(batch)
                self._stable.setdefault(key, _Stable()).add(batch)

    def _decisions(self, data: bytes) -> None:
        for record in decode_batch(data):
            key = transaction_records_pb2.TransactionRecordKey.FromString(bytes(record.key or b""))
            if record.value is None:
                continue
            if key.WhichOneof("key") == "group":
                commit = transaction_records_pb2.GroupCommitValue.FromString(bytes(record.value))
                self.history.note(
                    GroupDecided(key.group, commit.epoch_number, _handles(key.group, commit))
                )
            else:
                value = transaction_records_pb2.TransactionValue.FromString(bytes(record.value))
                self._instance(key.transactional_id, value.instance_id)
                self._decision(value)

    def _instance(self, transactional_id: str, instance: bytes) -> None:
        if self._instances.get(transactional_id) != instance:
            self._instances[transactional_id] = instance
            self.history.note(Taken(transactional_id, instance))

    def _decision(self, value: transaction_records_pb2.TransactionValue) -> None:
        commit = _DECIDED.get(value.state)
        if commit is not None:
            # The record that decides has the epoch of the marks, which is the next one.
            identity = Identity(value.producer_id, value.producer_epoch - 1)
            self.decided += bool(value.partitions)
            self.history.note(Decided(identity, commit, bool(value.kept), value.lapsed))
        if value.last_producer_id >= 0:
            identity = Identity(value.last_producer_id, value.last_producer_epoch)
            self.history.note(Decided(identity, value.last_committed))

    # The last stable offset.

    def check_stable(
        self, key: TopicIdPartition, high_watermark: int, stable: int, who: str
    ) -> None:
        """None of a transaction lies below it that is open as of the high watermark."""
        if key in self._stable:
            most = self._stable[key].at(high_watermark)
            check(
                stable <= most,
                f"{key.partition}: {who} the last stable offset {stable} at high watermark "
                f"{high_watermark}, but a transaction is open there from {most} on",
            )

    def check_leader(
        self, key: TopicIdPartition, leader_epoch: int, high_watermark: int, stable: int
    ) -> None:
        """In a leader epoch the last stable offset never goes back, and is not too high."""
        before = self._led.get((key, leader_epoch), 0)
        check(
            stable >= before,
            f"{key.partition}: in leader epoch {leader_epoch} the last stable offset went from "
            f"{before} back to {stable}",
        )
        self._led[key, leader_epoch] = stable
        self.check_stable(key, high_watermark, stable, "a leader has")

    def judge(self, anomalies: Iterable[Anomaly]) -> None:
        """Raise Violation where there is an anomaly."""
        gone = self.history.deleted()
        logs = {key: log for key, log in self.logs.items() if key not in gone}
        for anomaly in anomalies:
            anomaly(self.history, logs)
