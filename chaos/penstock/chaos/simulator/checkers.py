"""What must hold in every run, looked at after every step.

The checkers know nothing of how the cluster works. They keep the committed log: what a leader has
shown below a high watermark. From then on every leader must have it, at the same offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.broker.core.partition_events import Role
from penstock.chaos.simulator.disk import Batch
from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import decode_batch


class Violation(AssertionError):  # noqa: N818 - it is what it is called everywhere.
    """A promise was broken."""


def check(holds: bool, what: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(what)


@dataclass(slots=True)
class CommittedLog:
    """What was ever shown as committed of one partition."""

    end: int = 0
    deleted: int = 0  # Records below may be gone: somebody deleted them.
    bases: list[int] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    values: dict[bytes, int] = field(default_factory=dict)  # Record values and their offsets.

    def batch_at(self, offset: int) -> bytes | None:
        """The batch that begins at ``offset``."""
        place = bisect_right(self.bases, offset) - 1
        return self.batches[place] if place >= 0 and self.bases[place] == offset else None

    def delete_below(self, offset: int) -> None:
        """Records below the offset may be gone from now on."""
        self.deleted = max(self.deleted, offset)

    def extend(self, batch: Batch, who: str) -> None:
        """The next committed batch."""
        check(batch.header.base_offset == self.end, f"{who}: a gap at {self.end}")
        self.bases.append(self.end)
        self.batches.append(batch.data)
        self.end = batch.header.next_offset
        for record in decode_batch(batch.data):
            value = bytes(record.value or b"")
            earlier = self.values.get(value, record.offset)
            self.values[value] = record.offset
            # Who deletes records deletes what is known of their producers, on replicas that begin
            # anew after them: a retry that comes so late is taken for a new batch (as in Kafka).
            check(
                earlier == record.offset or earlier < self.deleted,
                f"{who}: {value!r} is committed twice, at {earlier} and {record.offset}",
            )


@dataclass(slots=True)
class _Seen:
    """How far a replica's log was compared with the committed one."""

    log: object
    generation: int
    offset: int = 0


class Checkers:
    """All invariants of one run."""

    def __init__(self) -> None:
        self.committed: dict[TopicIdPartition, CommittedLog] = {}
        self.acknowledged = 0
        self.read = 0
        self._leaders: dict[tuple[TopicIdPartition, int], tuple[int, object]] = {}
        self._newest: dict[TopicIdPartition, int] = {}  # The newest leader epoch that began.
        self._high_watermarks: dict[tuple[int, TopicIdPartition, int], int] = {}
        self._seen: dict[tuple[int, TopicIdPartition], _Seen] = {}
        self._snapshots: dict[int, bytes] = {}

    @property
    def leaderships(self) -> int:
        """How many leader epochs there were."""
        return len(self._leaders)

    def log_of(self, key: TopicIdPartition) -> CommittedLog:
        """The committed log of a partition."""
        return self.committed.setdefault(key, CommittedLog())

    # Replicas.

    def after_step(self, touched: Iterable[SimulatedPartition]) -> None:
        """Look at the replicas to which something happened."""
        for partition in touched:
            if partition.broker.alive:
                self._check_replica(partition)

    def _check_replica(self, partition: SimulatedPartition) -> None:
        replica, log = partition.replica, partition.log
        replica.validate()
        who = f"{partition.key.partition} on broker {partition.broker.node_id}"
        if replica.role is Role.LEADER:
            self._check_leadership(partition, who)
        committed = self.log_of(partition.key)
        below = replica.high_watermark
        if replica.role is Role.LEADER and replica.leader_epoch == self._newest[partition.key]:
            # A former leader that does not know it yet may lack what was committed since.
            below = max(below, committed.end)
            check(
                log.log_end_offset >= committed.end,
                f"{who} leads in epoch {replica.leader_epoch} with {log.log_end_offset} records, "
                f"but {committed.end} were committed",
            )
        self._compare(partition, committed, below, who)

    def _check_leadership(self, partition: SimulatedPartition, who: str) -> None:
        replica = partition.replica
        process = partition.broker
        leadership = (partition.key, replica.leader_epoch)
        newest = self._newest.get(partition.key, -1)
        self._newest[partition.key] = max(newest, replica.leader_epoch)
        first = self._leaders.setdefault(leadership, (process.node_id, process))
        check(
            first[1] is process,
            f"{who}: leader epoch {replica.leader_epoch} was led by broker {first[0]} before",
        )
        mark = (process.node_id, partition.key, replica.leader_epoch)
        before = self._high_watermarks.get(mark, 0)
        check(
            replica.high_watermark >= before,
            f"{who}: the high watermark went from {before} to {replica.high_watermark}",
        )
        self._high_watermarks[mark] = replica.high_watermark

    def _compare(
        self, partition: SimulatedPartition, committed: CommittedLog, below: int, who: str
    ) -> None:
        """Compare the replica's log with the committed one below an offset, and extend that."""
        log = partition.log
        place = (partition.broker.node_id, partition.key)
        seen = self._seen.get(place)
        if seen is None or seen.log is not log or seen.generation != log.generation:
            seen = self._seen[place] = _Seen(log, log.generation)
        if seen.offset >= below:
            return
        leads = partition.replica.role is Role.LEADER
        for batch in log.batches_from(max(seen.offset, log.log_start_offset)):
            header = batch.header
            if header.next_offset > below:
                break
            if header.base_offset >= committed.end:
                if not leads or header.next_offset > partition.replica.high_watermark:
                    break
                committed.extend(batch, who)
            expected = committed.batch_at(header.base_offset)
            check(
                expected == batch.data,
                f"{who} (epoch {partition.replica.leader_epoch}) has another batch at "
                f"{header.base_offset} than was committed there",
            )
            seen.offset = header.next_offset

    # Clients.

    def acknowledged_all(
        self, key: TopicIdPartition, base_offset: int, values: list[bytes]
    ) -> None:
        """A producer was told that all replicas have its batch."""
        self.acknowledged += 1
        known = self.log_of(key).values
        if base_offset < self.log_of(key).deleted:
            return
        for number, value in enumerate(values):
            check(
                known.get(value) == base_offset + number,
                f"{value!r} was acknowledged by all at {base_offset + number}, but is committed "
                f"at {known.get(value)}",
            )

    def consumed(self, key: TopicIdPartition, offset: int, batch: bytes) -> None:
        """A reader was given a batch."""
        self.read += 1
        check(
            self.log_of(key).batch_at(offset) == batch,
            f"{key.partition}: a reader saw a batch at {offset} that was not committed there",
        )

    # Controllers.

    def entry_applied(self, state: ClusterState) -> bool:
        """A controller applied an entry: all must have the same state then. True for the first."""
        index = state.applied_index
        snapshot = state.snapshot()
        known = self._snapshots.setdefault(index, snapshot)
        check(known == snapshot, f"two controllers have different states at index {index}")
        if known is not snapshot:
            return False
        state.validate()
        return True

    # The end.

    def at_rest(self, partitions: Iterable[SimulatedPartition]) -> None:
        """When all faults are over and nothing is under way: every replica has everything."""
        for partition in partitions:
            committed = self.log_of(partition.key)
            who = f"{partition.key.partition} on broker {partition.broker.node_id}"
            log = partition.log
            check(log.log_end_offset == committed.end, f"{who} is not up to date")
            check(partition.replica.high_watermark == committed.end, f"{who}: a late watermark")
            self._compare(partition, committed, committed.end, who)
