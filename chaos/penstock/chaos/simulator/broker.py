"""A broker's process in the simulator: registration, heartbeats, metadata, and its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.broker.core.lease import Lease
from penstock.broker.core.log_copy import LogCopy
from penstock.broker.core.metadata_image import ImageChange, MetadataImage, replication_factor
from penstock.broker.core.partition_events import (
    BrokersChanged,
    BrokerStatus,
    LogFailed,
    MinIsrChanged,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    Role,
)
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.core.replica import Replica
from penstock.broker.core.replica_reports import ReplicaReports
from penstock.chaos.simulator.ageing import Ageing, Ages
from penstock.chaos.simulator.controller import CLUSTER_ID
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.feeds import Feeds
from penstock.chaos.simulator.inbox import Inbox
from penstock.chaos.simulator.links import Links
from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.chaos.simulator.repair import Repairs
from penstock.chaos.simulator.scheduler import Clock, Scheduler, Timer
from penstock.chaos.simulator.serving import serve
from penstock.chaos.simulator.shut_logs import ShutLogs
from penstock.chaos.simulator.transactions.broker import Transactions
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.topic_config import effective_min_isr

HEARTBEAT_MS: Final = 300
SESSION_TIMEOUT_MS: Final = 1500
LAG_MAX_MS: Final = 700
_CALL_TIMEOUT_MS: Final = 1000
_FAILED: Final = StorageError("the disk failed")


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """What a broker's process stands on. ``scrubs``: bits may flip, and somebody looks for it.
    ``passes`` hears of steps of transactions, whose producers' last epoch is ``last_epoch``;
    ``too_large`` is as in Plan.
    """

    scheduler: Scheduler
    network: Network
    clock: Clock
    disk: Disk
    rng: Random
    controllers: tuple[int, ...]
    touched: dict[tuple[int, TopicIdPartition], SimulatedPartition]
    flush_failed: Callable[[int, TopicIdPartition], None]
    given_up: Callable[[int, TopicIdPartition], None]
    dropped: Callable[[int, LogCopy], None]
    began: Callable[[bytes], None]
    passes: Callable[[int, str], None]
    scrubs: bool
    last_epoch: int
    too_large: float
    ages: Ages


class SimulatedBroker:
    """One process."""

    def __init__(self, node_id: int, place: BrokerPlace) -> None:
        self.node_id = node_id
        self.address = node_id
        self.alive = True
        self.place = place
        self.disk = place.disk
        self.rng = place.rng
        self.image = MetadataImage()
        self.partitions: dict[TopicIdPartition, SimulatedPartition] = {}
        self.broker_epoch = -1
        self.may_stop = False
        self.feeds = Feeds(self)
        self.links = Links(self)
        self.reports = ReplicaReports(node_id, self.image)
        self.repairs = Repairs(self)
        self.shut_logs = ShutLogs(self)
        self.transactions = Transactions(self)
        self._ageing = Ageing(self)
        self._lease = Lease(SESSION_TIMEOUT_MS)
        self._previous_epoch = self.disk.runs.begin(self.disk.shut.keys())
        self._incarnation_id = place.rng.randbytes(16)
        place.began(self._incarnation_id)
        self._brokers: dict[int, BrokerStatus] = {}
        self._caught_up = False
        self._is_ready = False  # To be let in; that is not taken back.
        self._failed_logs: set[TopicIdPartition] = set()
        self._reporting = False
        self._heartbeat: End | None = None
        self._heartbeat_timer: Timer | None = None
        self._heard_by = -1
        self._sequence = 0
        self._sent_ms: dict[int, int] = {}
        self._want_shutdown = False
        self._deltas: Inbox[cluster_pb2.MetadataDelta] = Inbox(self, self._on_metadata)
        self._watch_metadata()
        self._register()

    # Basics.

    @property
    def now_ms(self) -> int:
        """What the node's clock shows."""
        return self.place.clock.now_ms

    def after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Let something happen later, if this process lives then."""
        return self.place.scheduler.after(
            delay_ms, lambda: action() if self.alive else None, node=self.node_id
        )

    def connect(self, target: int, service: str) -> End:
        """Open a stream to another broker."""
        return self.place.network.connect(self, target, service)

    def _command(self, on_result: Callable[[Any], None], **body: Any) -> None:
        """Send a command to the controller that is thought to be active, once."""
        target = self.image.controller_id
        if target < 0 or self.rng.random() < 0.2:
            target = self.rng.choice(self.place.controllers)
        self.place.network.call(
            self,
            -target,
            "command",
            cluster_pb2.Command(**body),
            on_result,
            timeout_ms=_CALL_TIMEOUT_MS,
        )

    def note(self, what: str) -> None:
        """Remember for the story of the run."""
        self.place.scheduler.note(what)

    def touch(self, partition: SimulatedPartition) -> None:
        """Note for the checkers that something happened to a partition in this step."""
        self.place.touched[self.node_id, partition.key] = partition

    def may_serve(self) -> bool:
        """The controllers were heard recently."""
        return self._lease.valid(self.now_ms)

    # Metadata.

    def _watch_metadata(self) -> None:
        end = self.place.network.connect(self, -self.rng.choice(self.place.controllers), "metadata")
        end.on_message = self._deltas.take
        end.on_broken = lambda: self._retry(self._watch_metadata)
        # A feed of an isolated controller says nothing; now and then another is tried.
        self.after(self.rng.randint(2000, 4000), end.lose_soon)

    def _retry(self, action: Callable[[], None]) -> None:
        self.after(self.rng.randint(20, 120), action)

    def act_late(self, for_ms: int) -> None:
        """Act on no metadata for a while; heartbeats, streams and answers go on meanwhile."""
        self._deltas.be_busy(for_ms)

    def _on_metadata(self, delta: cluster_pb2.MetadataDelta) -> None:
        if not self.alive:
            return
        change = self.image.apply(delta)
        if change is None:
            return
        self.transactions.groups.metadata_changed(change)
        if self._caught_up:
            self._follow(change)
        self._catch_up()
        self.report()
        self.repairs.metadata_changed()
        self.shut_logs.metadata_changed()
        self.links.metadata_changed()

    def _catch_up(self) -> None:
        """Begin to host once the image has reached the registration."""
        if not self._caught_up and 0 <= self.broker_epoch <= self.image.index:
            self._caught_up = True
            self._brokers_changed()
            self._take_all()
            self._remove_strays()
            self.report()

    def _follow(self, change: ImageChange) -> None:
        if change.brokers or change.snapshot:
            self._brokers_changed()
        if change.snapshot:
            self._take_all()
            return
        for topic in change.removed_topics:
            for number in topic.partitions:
                self._drop(TopicIdPartition(topic.topic_id, number), ordered=True)
            self.transactions.topics_removed(frozenset([topic.topic_id]))
        for record in change.partitions:
            self._partition_changed(record, ordered=True)
        for topic_id in change.topics:
            self._configs_changed(topic_id)

    def _take_all(self) -> None:
        for key in [*self.partitions, *self.reports.offline()]:
            if self.image.partition_by_id(key) is None:
                self._drop(key, ordered=self.image.was_deleted(key.topic_id))
        for topic in self.image.topics():
            for record in topic.partitions.values():
                self._partition_changed(record)
            self._configs_changed(topic.topic_id)

    def _brokers_changed(self) -> None:
        self._brokers = {
            node_id: BrokerStatus(
                broker.broker_epoch, not (broker.fenced or broker.in_controlled_shutdown)
            )
            for node_id, broker in self.image.brokers.items()
        }
        for partition in list(self.partitions.values()):
            partition.handle(BrokersChanged(self._brokers, self.now_ms))

    def _configs_changed(self, topic_id: TopicId) -> None:
        topic = self.image.topic_by_id(topic_id)
        assert topic is not None
        for number, record in topic.partitions.items():
            partition = self.partitions.get(TopicIdPartition(topic_id, number))
            if partition is not None:
                min_isr = effective_min_isr(topic.record.configs, replication_factor(record))
                partition.handle(MinIsrChanged(min_isr))

    def _partition_changed(
        self, record: cluster_pb2.PartitionRecord, *, ordered: bool = False
    ) -> None:
        key = TopicIdPartition(TopicId(record.topic_id), record.partition)
        topic = self.image.topic_by_id(key.topic_id)
        if topic is None or self.node_id not in record.replicas:
            hosted = self.partitions.get(key)
            moved = hosted is not None and record.leader_epoch > hosted.log.last_epoch
            self._drop(key, ordered=ordered or moved)
            return
        if key in self._failed_logs and key not in self.partitions:
            # What its disk has of it may come back: it is not made anew.
            self.reports.set_offline(key, _FAILED)
            return
        partition = self.partitions.get(key)
        if partition is None and self.reports.why_offline(key) is None:
            partition = self._make(key)
        self.reports.compare(key)
        if partition is not None:
            partition.handle(
                PartitionChanged(
                    state=PartitionState.from_record(record),
                    min_isr=effective_min_isr(topic.record.configs, replication_factor(record)),
                    now_ms=self.now_ms,
                )
            )

    def _make(self, key: TopicIdPartition) -> SimulatedPartition | None:
        try:
            log = self.disk.log(key)
        except DamagedLogError as error:
            self.note(f"{key.partition} on {self.node_id}: the log does not open")
            self.reports.set_offline(key, error)
            self.shut_logs.found(key, error)
            return None
        replica = Replica(
            self.node_id,
            log,
            high_watermark=self.disk.high_watermarks.get(key, 0),
            lag_max_ms=LAG_MAX_MS,
        )
        partition = SimulatedPartition(key, log, replica, self)
        self.partitions[key] = partition
        partition.handle(BrokersChanged(self._brokers, self.now_ms))
        return partition

    def why_shut(self, key: TopicIdPartition) -> DamagedLogError | None:
        """Why the log of a replica that is here does not open; None where it does."""
        reason = self.reports.why_offline(key)
        return reason if isinstance(reason, DamagedLogError) else None

    def shut_log(self, partition: SimulatedPartition) -> None:
        """A log contradicts what others have, as one does in which a leader epoch has changed."""
        error = DamagedLogError(
            "it has what nobody wrote",
            partition.log.log_end_offset,
            partition.replica.high_watermark,
        )
        self.disk.shut_off(partition.key, error)
        self.reports.set_offline(partition.key, error)
        partition.handle(LogFailed())
        self.shut_logs.found(partition.key, error)
        self.report()

    def begin_anew(self, copy: LogCopy) -> None:
        """Host the replica with an empty log in place of one that can't be used."""
        record = self.image.partition_by_id(copy.key)
        assert record is not None, "it is a replica that others lead"
        self.place.dropped(self.node_id, copy)
        partition = self.partitions.pop(copy.key, None)
        if partition is not None:
            partition.close()
            self.links.unfollow(copy.key)
        self.disk.keep_damaged(copy.key)
        self.reports.set_copying(copy.key, copy.error)
        self._partition_changed(record, ordered=True)
        self.report()

    def _drop(self, key: TopicIdPartition, *, ordered: bool) -> None:
        """As penstock.broker.replication.hosting does: delete on an order, or on a proof."""
        is_shut = self.why_shut(key) is not None
        self.reports.forget(key)
        partition = self.partitions.pop(key, None)
        if is_shut:
            ordered = self.image.was_deleted(key.topic_id)
        if partition is not None:
            partition.close()
            self.links.unfollow(key)
        elif not is_shut:
            return
        if key in self._failed_logs:
            return
        if ordered:
            self.disk.erase(key)
        else:
            self.disk.set_aside(key)

    def _remove_strays(self) -> None:
        for key in self.disk.partitions():
            if key in self.partitions:
                continue
            record = self.image.partition_by_id(key)
            moved = record is not None and record.leader_epoch > self.disk.log(key).last_epoch
            if moved or self.image.was_deleted(key.topic_id):
                self.disk.erase(key)
            else:
                self.disk.set_aside(key)

    # A disk that fails.

    def fail_logs(self, keys: Iterable[TopicIdPartition]) -> None:
        """The disk with these logs fails, for as long as this process lives."""
        self.disk.runs.doubt()
        for key in keys:
            partition = self.partitions.get(key)
            if partition is not None and key not in self._failed_logs:
                self.disk.failed.add(key)
                self._give_up(partition)
        self.report()

    def records_lost(self, partition: SimulatedPartition) -> None:
        """A replica is given up that led without all that it had written, as long as this lives."""
        self.disk.runs.records_lost()
        self._give_up(partition)
        self.report()

    def _give_up(self, partition: SimulatedPartition) -> None:
        self._failed_logs.add(partition.key)
        self.reports.set_offline(partition.key, _FAILED)
        partition.handle(LogFailed())

    # What the controllers are told of replicas.

    def report(self) -> None:
        """Tell the controllers what is due, one report at a time, as ReplicaReporter does."""
        if self._reporting or not self._caught_up:
            return
        command = self.reports.next_report(self.broker_epoch)
        if command is not None:
            self._reporting = True
            self._command(self._reported, report_replicas=command)

    def _reported(self, result: cluster_pb2.CommandResult | None) -> None:
        self._reporting = False
        taken = result is not None and not result.HasField("error")
        self.reports.answered(taken=taken)
        if taken:
            self.report()
        else:
            self._retry(self.report)

    # Registration and heartbeats.

    def _register(self) -> None:
        known = self.image.brokers.get(self.node_id)
        registration = cluster_pb2.RegisterBrokerCommand(
            node_id=self.node_id,
            incarnation_id=self._incarnation_id,
            cluster_id=CLUSTER_ID,
            host="simulated",
            port=1,
            previous_broker_epoch=self._previous_epoch,
            follows_broker_epoch=0 if known is None else known.broker_epoch,
        )
        self._command(self._registered, register_broker=registration)

    def _registered(self, result: cluster_pb2.CommandResult | None) -> None:
        if result is None or result.HasField("error"):
            self._retry(self._register)
            return
        self.broker_epoch = result.register_broker.broker_epoch
        self.disk.runs.registered(self.broker_epoch, failed=bool(self.disk.failed))
        self._catch_up()
        self.links.renew()
        self._open_heartbeat()

    def _open_heartbeat(self) -> None:
        target = self.image.controller_id
        if target < 0 or self.rng.random() < 0.1:
            target = self.rng.choice(self.place.controllers)
        end = self.place.network.connect(self, -target, "heartbeat")
        end.on_message = lambda response: self._heartbeat_answered(end, response)
        end.on_broken = lambda: self._heartbeat_broken(end)
        self._heartbeat = end
        self._heard_by = target
        self._beat()

    def _beat(self) -> None:
        end = self._heartbeat
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if end is None:
            return
        known = self.image.controller_id
        silent_ms = self._lease.silent_ms(self.now_ms)
        lost = silent_ms is None or silent_ms > SESSION_TIMEOUT_MS // 2
        if lost and known not in (-1, self._heard_by):
            end.close()
            self._open_heartbeat()
            return
        self._sequence += 1
        self._sent_ms[self._sequence] = self.now_ms
        end.send(
            controller_pb2.BrokerHeartbeatRequest(
                node_id=self.node_id,
                broker_epoch=self.broker_epoch,
                metadata_index=self.image.index,
                want_shutdown=self._want_shutdown,
                want_fence=not self._may_be_let_in(),
                sequence=self._sequence,
            )
        )
        self._heartbeat_timer = self.after(HEARTBEAT_MS, self._beat)

    def _may_be_let_in(self) -> bool:
        """The controllers know what can't be served here, and make it lead none of that."""
        self._is_ready = self._is_ready or (self._caught_up and self.reports.is_settled)
        return self._is_ready

    def _heartbeat_answered(
        self, end: End, response: controller_pb2.BrokerHeartbeatResponse
    ) -> None:
        if end is not self._heartbeat or not self.alive:
            return
        if response.HasField("error"):
            stale = response.error.code == ErrorCode.STALE_BROKER_EPOCH
            assert not stale, f"broker {self.node_id} would end: {response.error.message}"
            end.close()
            self._heartbeat_broken(end)
            return
        sent_ms = self._sent_ms.get(response.sequence)
        if sent_ms is not None:
            self._lease.answered(sent_ms)
            self._sent_ms = {
                number: sent for number, sent in self._sent_ms.items() if sent >= sent_ms
            }
        self.may_stop = self.may_stop or response.may_shut_down

    def _heartbeat_broken(self, end: End) -> None:
        if end is self._heartbeat:
            self._heartbeat = None
            self._retry(self._open_heartbeat)

    def shut_down(self) -> None:
        """Ask for leaderships to be moved away; ``may_stop`` says when that is done."""
        self._want_shutdown = True
        self._beat()

    # What partitions ask.

    def role_changed(self, partition: SimulatedPartition) -> None:
        """A replica has another role or leader."""
        self.transactions.role_changed(partition)
        if partition.replica.role is Role.FOLLOWER:
            self.links.follow(partition)
        else:
            self.links.unfollow(partition.key)

    def checkpoint_now_and_then(self, partition: SimulatedPartition) -> None:
        """Keep a high watermark; an old one must do no harm."""
        if self.rng.random() < 0.1:
            self.disk.high_watermarks[partition.key] = partition.replica.high_watermark

    def propose(self, partition: SimulatedPartition, answered: Callable[..., None]) -> None:
        """Send the replica's proposal until its outcome is known."""
        proposal = partition.replica.pending
        if proposal is None:
            answered(again=False)
            return
        entry = cluster_pb2.AlterPartitionEntry(
            topic_id=partition.key.topic_id,
            partition=partition.key.partition,
            leader_epoch=proposal.leader_epoch,
            partition_epoch=proposal.partition_epoch,
            new_isr=[
                cluster_pb2.IsrMember(node_id=node_id, broker_epoch=epoch)
                for node_id, epoch in proposal.members
            ],
        )

        def on_result(result: cluster_pb2.CommandResult | None) -> None:
            if result is None or result.HasField("error"):
                self._retry(lambda: answered(again=True))
                return
            outcome = result.alter_partition.partitions[0]
            state = (
                PartitionState.from_record(outcome.partition)
                if outcome.HasField("partition")
                else None
            )
            error = ErrorCode(outcome.error.code) if outcome.HasField("error") else None
            partition.handle(ProposalAnswered(proposal, error, state, self.now_ms))
            if partition.replica.pending is proposal:
                self._retry(lambda: answered(again=True))
            else:
                answered(again=True)

        command = cluster_pb2.AlterPartitionCommand(
            node_id=self.node_id, broker_epoch=self.broker_epoch, partitions=[entry]
        )
        self._command(on_result, alter_partition=command)

    def take_producer_id(
        self, answered: Callable[[cluster_pb2.CommandResult | None], None]
    ) -> None:
        """Ask the controllers for a producer id, once."""
        command = cluster_pb2.AllocateProducerIdsCommand(
            node_id=self.node_id, broker_epoch=self.broker_epoch
        )
        self._command(answered, allocate_producer_ids=command)

    # What others ask.

    def accept(self, service: str, end: End) -> None:
        """A follower opens its stream, or a group's member, or a producer that wants no answers."""
        if service == "replication":
            self.feeds.accept(end)
            return
        if service == "group heartbeat":
            self.transactions.groups.accept(end)
            return
        assert service == "produce"
        end.on_message = lambda request: self.serve("produce", request, lambda _: None)

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a client."""
        if self.alive:
            serve(self, method, request, reply)
