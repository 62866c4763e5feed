"""What must hold in every run, looked at after every step.

The checkers know nothing of how the cluster works. They keep the committed log: what a leader has
shown below a high watermark. From then on every leader must have it, at the same offsets, and so
must every member of an in-sync set, whether it runs or not.

Records may be lost where nothing was promised: by an unclean election that the topic allows, and
when no member of the in-sync set has kept them (under flush.policy interval and os, and when disks
are lost). The checkers know whose log was damaged; who is elected in spite of an intact one breaks
a promise. What is left then is compared as strictly as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.broker.core.log_copy import LogCopy
from penstock.broker.core.partition_events import Role
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.copies import Copies
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.history import CommittedLog, Violation, check
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.model import NO_LEADER, Broker, Partition
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.records import parse_header

__all__ = ["Checkers", "CommittedLog", "Violation", "check"]


@dataclass(slots=True)
class _Seen:
    """How far a replica's log was compared with the committed one, and with all others."""

    log: MemoryLog
    changes: tuple[int, int]  # How often it was cut and mended.
    committed: CommittedLog
    offset: int = 0
    matched: int = 0


@dataclass(slots=True)
class _Led:
    """What a leader had at last: its high watermark, and the end of its log."""

    high_watermark: int = 0
    end: int = 0


class Checkers:
    """All invariants of one run. ``disks``: of every node, to look at.

    ``hands_over``: leaders hand over what they know of producers to who begins anew.
    """

    def __init__(self, disks: Mapping[int, Disk] | None = None, *, hands_over: bool = True) -> None:
        self.acknowledged = 0
        self.read = 0
        self.losses = 0  # Elections that lost what was committed, as they were allowed to.
        self.passed_over = 0  # Of those, clean ones that lost what an unharmed disk had.
        # Who was in sync or eligible, and is not any more for its restart alone.
        self._set_back: set[tuple[int, TopicIdPartition]] = set()
        self.unclean_ordered: set[TopicIdPartition] = set()
        self.partitions: dict[TopicIdPartition, Partition] = {}  # As the controllers have them.
        self._disks = disks or {}
        self._hands_over = hands_over
        self._branches: dict[TopicIdPartition, list[CommittedLog]] = {}
        self._leaders: dict[tuple[TopicIdPartition, int], tuple[int, object]] = {}
        self._newest: dict[TopicIdPartition, int] = {}  # The newest leader epoch that began.
        self._led: dict[tuple[int, TopicIdPartition, int], _Led] = {}
        self._producers_of: dict[tuple[int, TopicIdPartition], tuple[MemoryLog, int]] = {}
        self._seen: dict[tuple[int, TopicIdPartition], _Seen] = {}
        self._written: dict[tuple[TopicIdPartition, int, int], bytes] = {}
        self._snapshots: dict[int, bytes] = {}
        self._damaged: dict[tuple[int, TopicIdPartition], int] = {}  # By whose broker epoch.
        self._registered: dict[int, int] = {}  # The brokers' epochs, as the controllers have them.
        self._copies = Copies(self._disks)
        self._may_lose: dict[tuple[TopicIdPartition, int], list[int]] = {}
        self.processes: list[bytes] = []  # The brokers' incarnation ids, as they began.
        self._newest_process: dict[int, int] = {}  # By broker: its number, as registered.

    @property
    def leaderships(self) -> int:
        """How many leader epochs there were."""
        return len(self._leaders)

    @property
    def committed(self) -> int:
        """How many records were committed."""
        return sum(branches[-1].end for branches in self._branches.values())

    def branches(self, key: TopicIdPartition) -> list[CommittedLog]:
        """The committed log of a partition, and before it those that were given up."""
        known = self._branches.get(key)
        if known is None:
            known = self._branches[key] = [CommittedLog(hands_over=self._hands_over)]
        return known

    def log_of(self, key: TopicIdPartition) -> CommittedLog:
        """The committed log of a partition."""
        return self.branches(key)[-1]

    def _log_in(self, key: TopicIdPartition, leader_epoch: int) -> CommittedLog:
        branches = self.branches(key)
        if len(branches) == 1:
            return branches[0]
        return next(
            (branch for branch in reversed(branches) if branch.first_epoch <= leader_epoch),
            branches[0],
        )

    def may_have_lost(self, key: TopicIdPartition) -> bool:
        """Records of the partition were lost that nobody had promised to keep, or deleted together
        with what was known of their producers.
        """
        branches = self.branches(key)
        return len(branches) > 1 or branches[0].forgotten > 0

    def given_up(self) -> set[TopicIdPartition]:
        """The partitions of which clients may miss or be told twice what was acknowledged."""
        return {key for key in self._branches if self.may_have_lost(key)}

    def deleted_from(self) -> set[TopicIdPartition]:
        """The partitions of which somebody deleted records."""
        return {key for key in self._branches if self.log_of(key).deleted}

    # Replicas.

    def after_step(self, touched: Iterable[SimulatedPartition]) -> None:
        """Look at the replicas to which something happened."""
        for partition in touched:
            if partition.broker.alive and not partition.closed:
                self._check_replica(partition)
                self._check_in_sync(partition.key)
            elif partition.replica.role is Role.LEADER:
                # It ended in this very step: what it said of what is committed before that counts.
                self._check_replica(partition)

    def _check_replica(self, partition: SimulatedPartition) -> None:
        replica, log = partition.replica, partition.log
        replica.validate()
        key, epoch = partition.key, replica.leader_epoch
        node_id = partition.broker.node_id
        place = node_id, key
        who = f"{key.partition} on broker {node_id}"
        # What is looked at after every step says in words what is wrong only where it is.
        self._check_producers(log, place, who)
        leads = replica.role is Role.LEADER
        if leads:
            self._check_leadership(partition, who)
            if (key, epoch) in self._may_lose and epoch == self._newest[key]:
                self._take_loss(partition)
        committed, below = self._history_of(partition)
        if leads and epoch == self._newest[key]:
            # A former leader that does not know it yet may lack what was committed since.
            below = max(below, committed.end)
            if log.log_end_offset < committed.end:
                check(
                    False,
                    f"{who} leads in epoch {epoch} with {log.log_end_offset} records, "
                    f"but {committed.end} were committed",
                )
        in_sync = self.partitions.get(key)
        if place in self._damaged:
            below = min(below, replica.high_watermark)
            out = in_sync is not None and node_id not in in_sync.isr
            if out and self._holds(node_id, key):
                del self._damaged[place]
        elif in_sync is not None and node_id in in_sync.isr and committed is self.log_of(key):
            below = max(below, committed.end)
        self._compare(partition, committed, below, who)

    def _check_producers(
        self, log: MemoryLog, place: tuple[int, TopicIdPartition], who: str
    ) -> None:
        """None is known of batches behind the end: as it was, where the log is as it was."""
        as_of = log, log.changes
        if self._producers_of.get(place) != as_of:
            self._producers_of[place] = as_of
            if log.producers.touches(log.log_end_offset):
                check(False, f"{who} knows of batches of producers behind its end")

    def _history_of(self, partition: SimulatedPartition) -> tuple[CommittedLog, int]:
        """The history that a replica is in, and below which offset it is held to that.

        Who follows keeps what it knew of an earlier history until it hears of its leader that its
        log is a prefix of the leader's; but who is in sync is in the newest history. A power loss
        may have brought back what was cut: then the high watermark that was kept says nothing of
        what lies below it until the leader was heard.
        """
        replica, log, key = partition.replica, partition.log, partition.key
        if replica.role is Role.LEADER:
            return self._log_in(key, replica.leader_epoch), replica.high_watermark
        node_id, now = partition.broker.node_id, self.partitions.get(key)
        if now is not None and node_id in now.isr and (node_id, key) not in self._damaged:
            return self.log_of(key), replica.high_watermark
        known = replica.high_watermark if log.history >= 0 else log.log_start_offset
        return self._log_in(key, log.history), known

    def _check_leadership(self, partition: SimulatedPartition, who: str) -> None:
        replica = partition.replica
        process = partition.broker
        leadership = (partition.key, replica.leader_epoch)
        newest = self._newest.get(partition.key, -1)
        self._newest[partition.key] = max(newest, replica.leader_epoch)
        first = self._leaders.setdefault(leadership, (process.node_id, process))
        if first[1] is not process:
            check(
                False,
                f"{who}: leader epoch {replica.leader_epoch} was led by broker {first[0]} before",
            )
        mark = (process.node_id, partition.key, replica.leader_epoch)
        led = self._led.get(mark)
        if led is None:
            led = self._led[mark] = _Led()
        if replica.high_watermark < led.high_watermark:
            check(
                False,
                f"{who}: the high watermark went from {led.high_watermark} to "
                f"{replica.high_watermark}",
            )
        led.high_watermark = replica.high_watermark
        end = partition.log.log_end_offset
        if end < led.end:
            check(False, f"{who}: the log of a leader ended at {led.end} and ends at {end}")
        led.end = end

    def _check_in_sync(self, key: TopicIdPartition) -> None:
        """Who is in sync as the controllers have it holds everything, and keeps it.

        So does who is an eligible leader (KIP-966): it may be elected at any time.
        """
        partition = self.partitions.get(key)
        if partition is None or not self._disks:
            return
        committed = self.log_of(key)
        for node_id in (*partition.isr, *partition.elr):
            if (node_id, key) not in self._damaged:
                end = max(self._disks[node_id].durable_end(key), 0)
                if end >= committed.end:
                    continue
                what = "in sync" if node_id in partition.isr else "an eligible leader"
                check(
                    False,
                    f"{key.partition}: broker {node_id} is {what} and has {end} records durably, "
                    f"but {committed.end} were committed",
                )

    def _compare(
        self, partition: SimulatedPartition, committed: CommittedLog, below: int, who: str
    ) -> None:
        """Compare the replica's log with the committed one below an offset, and extend that."""
        log = partition.log
        place = (partition.broker.node_id, partition.key)
        seen = self._seen.get(place)
        changes = log.generation, log.mends
        if seen is None or seen.log is not log or seen.changes != changes:
            seen = self._seen[place] = _Seen(log, changes, committed)
        elif seen.committed is not committed:
            seen.committed, seen.offset = committed, 0
        if seen.matched < log.log_end_offset:
            self._match(partition.key, seen, who)
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
                # Of one that a bit has flipped in since (an unclean leader may have no other) what
                # counts is what was written.
                written = (partition.key, header.leader_epoch, header.base_offset)
                committed.extend(batch._replace(data=self._written[written]), who)
            expected = committed.batch_at(header.base_offset)
            if expected == batch.data or header.base_offset in log.contents.flipped:
                seen.offset = header.next_offset
                continue
            check(
                False,
                f"{who} (epoch {partition.replica.leader_epoch}) has another batch at "
                f"{header.base_offset} than was committed there",
            )
            seen.offset = header.next_offset

    def _match(self, key: TopicIdPartition, seen: _Seen, who: str) -> None:
        """What one leader wrote at an offset is what all have there of its epoch."""
        log = seen.log
        for header, data in log.batches_from(max(seen.matched, log.log_start_offset)):
            written = self._written.setdefault((key, header.leader_epoch, header.base_offset), data)
            if written != data and header.base_offset not in log.contents.flipped:
                check(
                    False,
                    f"{who} has another batch at {header.base_offset} than others have of leader "
                    f"epoch {header.leader_epoch}",
                )
            seen.matched = header.next_offset

    # Losses that are nobody's fault.

    def _holds(self, node_id: int, key: TopicIdPartition) -> bool:
        """Everything that was committed is in the node's log."""
        committed = self.log_of(key)
        contents = self._disks[node_id].contents(key) or Contents()
        return self._agreed_end(contents, committed) >= committed.end

    @staticmethod
    def _agreed_end(contents: Contents, committed: CommittedLog) -> int:
        """Up to where a log has what was committed."""
        agreed = min(contents.start, committed.end)
        for header, data in contents.batches:
            if header.base_offset >= committed.end:
                break
            known = committed.batch_at(header.base_offset)
            if known != data and not (
                known is not None
                and header.base_offset in contents.flipped
                and header.leader_epoch == parse_header(known).leader_epoch
            ):
                break
            agreed = header.next_offset
        return min(agreed, contents.end, committed.end)

    def records_lost(
        self, node_id: int, broker_epoch: int, keys: Iterable[TopicIdPartition]
    ) -> None:
        """A node's logs lost what its process of this broker epoch may have acknowledged.

        That may count in a high watermark that rises later, so even who has everything now counts
        for nothing until it was out of the in-sync set, or leads anew. A process that was not
        registered yet had the logs of the one that was.
        """
        broker_epoch = max(broker_epoch, self._registered.get(node_id, -1))
        for key in keys:
            if key in self.partitions and node_id in self.partitions[key].replicas:
                self._damaged[node_id, key] = broker_epoch

    def is_intact_elsewhere(self, node_id: int, key: TopicIdPartition) -> bool:
        """Another replica that may lead has everything, and no bit of it is flipped."""
        partition = self.partitions.get(key)
        return partition is not None and any(
            other != node_id
            and self._holds(other, key)
            and not (self._disks[other].contents(key) or Contents()).flipped
            for other in (*partition.isr, *partition.elr)
        )

    def kept_elsewhere(self, node_id: int, key: TopicIdPartition) -> set[bytes]:
        """The sound batches that others who may lead would have after a power loss."""
        partition = self.partitions[key]
        kept: set[bytes] = set()
        for other in {*partition.isr, *partition.elr} - {node_id}:
            on_disk = self._disks[other].synced(key)
            kept.update(
                batch.data
                for batch in on_disk.batches
                if batch.header.base_offset not in on_disk.flipped
            )
        return kept

    def log_dropped(self, node_id: int, broker_epoch: int, copy: LogCopy) -> None:
        """A broker drops a log that does not open, and is to have it copied.

        What is committed of it is on the disks of others that may lead, and sound. That is as far
        as the broker can know: of files that are gone there is nothing left to drop.
        """
        key, disk = copy.key, self._disks[node_id]
        committed, partition = self.log_of(key), self.partitions.get(key)
        contents = disk.contents(key)
        if partition is None or contents is None:
            return  # The topic is deleted, and the broker has not heard of it.
        kept: set[bytes] = set()
        for other in {*partition.isr, *partition.elr} - {node_id}:
            theirs = self._disks[other]
            found = theirs.synced(key) if disk.runs.waits else theirs.contents(key) or Contents()
            kept.update(
                batch.data
                for batch in found.batches
                if batch.header.base_offset not in found.flipped
            )
        for header, data in contents.batches:
            is_left = header.next_offset <= copy.error.end_offset
            counts = is_left and header.base_offset >= committed.deleted
            if counts and committed.batch_at(header.base_offset) == data:
                check(
                    data in kept,
                    f"{key.partition}: broker {node_id} drops its log, the last to have the "
                    f"committed batch at {header.base_offset}",
                )
        self._copies.begin(node_id, broker_epoch, copy)

    def lacks_nothing(self, node_id: int, key: TopicIdPartition) -> bool:
        """A node's log has all that was ever committed, and no bit of it is flipped."""
        contents = self._disks[node_id].contents(key)
        whole = contents is not None and not contents.flipped and self._holds(node_id, key)
        return whole and len(self.branches(key)) == 1

    def _take_loss(self, partition: SimulatedPartition) -> None:
        """A leader begins that is allowed to lack committed records: what it has counts now."""
        key, epoch = partition.key, partition.replica.leader_epoch
        others = self._may_lose.pop((key, epoch))
        committed = self.log_of(key)
        # It shows no more than what it could not lose at once.
        agreed = self._agreed_end(partition.log.contents, committed)
        agreed = min(agreed, partition.log.durable_offset)
        lost = agreed < committed.end
        check(
            not (lost and others),
            f"{key.partition}: broker {partition.broker.node_id} leads, whose disk has lost "
            f"records that {others} have",
        )
        if not others:
            # Though it may lack nothing: a former leader that has not heard of it goes on in the
            # history before, and what it shows from now on is lost.
            self.losses += lost
            if lost and not self._recovering(key):
                self._check_set_back(key, epoch)
            self.branches(key).append(committed.fork(agreed, epoch))
            partition.broker.note(
                f"{key.partition}: leader epoch {epoch} begins with {agreed} of {committed.end} "
                "committed records"
            )
        self._damaged.pop((partition.broker.node_id, key), None)

    def _recovering(self, key: TopicIdPartition) -> bool:
        partition = self.partitions.get(key)
        return partition is None or partition.recovering

    def _check_set_back(self, key: TopicIdPartition, epoch: int) -> None:
        """A clean election lost what an unharmed disk has, whose broker restarted uncleanly.

        Under flush.policy commit such a disk has all that was acknowledged, and its broker says so.
        """
        passed_over = [
            node_id
            for node_id in self.partitions[key].replicas
            if (node_id, key) in self._set_back
            and (node_id, key) not in self._damaged
            and self._holds(node_id, key)
        ]
        self.passed_over += bool(passed_over)
        for node_id in passed_over:
            check(
                not self._disks[node_id].runs.waits,
                f"{key.partition}: leader epoch {epoch} begins without records that broker "
                f"{node_id} has on its disk, which no harm came to; it was set back for a restart",
            )

    def _note_set_back(
        self, key: TopicIdPartition, before: Partition, now: Partition, anew: int, min_isr: int
    ) -> None:
        """Keep in mind who loses its place by registering anew, though it may have everything.

        ``anew`` is the broker that does, or -1. Once enough others are in sync records may be
        acknowledged without it.
        """
        for node_id in now.replicas:
            place = node_id, key
            if node_id in (*now.isr, *now.elr) or len(now.isr) >= min_isr:
                self._set_back.discard(place)
            elif node_id == anew and node_id in (*before.isr, *before.elr):
                runs = self._disks[node_id].runs
                heard = runs.heard_epoch == self._registered.get(node_id)
                if heard and not runs.was_doubted and place not in self._damaged:
                    self._set_back.add(place)

    def _partition_changed(
        self,
        key: TopicIdPartition,
        before: Partition,
        now: Partition,
        brokers: Mapping[int, Broker],
        *,
        unclean: bool,
    ) -> None:
        for node_id in set(now.isr).difference(before.isr, (now.leader,)):
            # Whoever joins under a later registration than the one that came to harm is whole.
            if self._damaged.get((node_id, key), -1) < brokers[node_id].broker_epoch:
                self._damaged.pop((node_id, key), None)
        elected = now.leader != NO_LEADER and now.leader_epoch > before.leader_epoch
        if not elected or not self._disks:
            return
        # Who was elected may be down for good: it has lost something once it leads.
        if now.recovering:
            check(unclean, f"{key.partition}: an unclean election that nobody allowed, {now}")
            self._may_lose[key, now.leader_epoch] = []
            self._damaged[now.leader, key] = brokers[now.leader].broker_epoch
        elif (now.leader, key) in self._damaged:
            self._may_lose[key, now.leader_epoch] = [
                node for node in (*before.isr, *before.elr) if (node, key) not in self._damaged
            ]

    # Clients.

    def acknowledged_all(
        self, key: TopicIdPartition, base_offset: int, values: list[bytes]
    ) -> None:
        """A producer was told that all replicas have its batch."""
        self.acknowledged += 1
        if base_offset < self.log_of(key).deleted:
            return
        for number, value in enumerate(values):
            offsets = {branch.values.get(value) for branch in self.branches(key)}
            check(
                base_offset + number in offsets,
                f"{value!r} was acknowledged by all at {base_offset + number}, but is committed "
                f"at {self.log_of(key).values.get(value)}",
            )

    def consumed(self, key: TopicIdPartition, offset: int, batch: bytes) -> None:
        """A reader was given a batch."""
        self.read += 1
        check(
            any(branch.batch_at(offset) == batch for branch in self.branches(key)),
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
        registered = {node: known.broker_epoch for node, known in state.brokers.items()}
        anew = next((node for node, at in registered.items() if at == index), -1)
        if anew >= 0:
            self._check_newest(anew, state.brokers[anew].incarnation_id)
        before = self.partitions
        self.partitions = {
            TopicIdPartition(TopicId(topic_id), number): partition
            for (topic_id, number), partition in state.all_partitions()
        }
        for key, partition in self.partitions.items():
            if key in before and before[key] is not partition:
                min_isr = state.topics[key.topic_id].min_isr(partition.replication_factor)
                if self._disks:
                    self._note_set_back(key, before[key], partition, anew, min_isr)
                unclean = state.topics[key.topic_id].unclean_election
                unclean = unclean or key in self.unclean_ordered
                self._partition_changed(key, before[key], partition, state.brokers, unclean=unclean)
            self._check_in_sync(key)
        self._registered = registered
        self._copies.check(self.partitions, registered)
        return True

    def _check_newest(self, node_id: int, incarnation_id: bytes) -> None:
        began = self.processes.index(incarnation_id)
        check(
            began > self._newest_process.get(node_id, -1),
            f"broker {node_id} is set back by the late registration of an earlier process",
        )
        self._newest_process[node_id] = began

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
            known = self.partitions.get(partition.key)
            on_record = known is not None and partition.broker.node_id in known.offline
            check(not on_record, f"{who} is sound, and on record as offline")
