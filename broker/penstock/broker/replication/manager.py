"""The partitions of one broker: leads some, follows others, answers for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import structlog

from penstock.broker.core import log_copy
from penstock.broker.core.catch_up import UNLIMITED, CatchUpBudget
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.partition_events import CopyAnew, IsrChanged, OutOfSync, Role, Tick
from penstock.broker.core.ports import AppendInfo, DamagedLogError, Log
from penstock.broker.replication import admitting, standing
from penstock.broker.replication.answers import Refusals
from penstock.broker.replication.appending import Appends, Target
from penstock.broker.replication.cold_reads import warm
from penstock.broker.replication.deadlines import Deadlines
from penstock.broker.replication.fetch import BOUNDLESS, Fetcher, Room
from penstock.broker.replication.follower import FollowerLinks
from penstock.broker.replication.hosting import Hosting
from penstock.broker.replication.isr import IsrProposer
from penstock.broker.replication.led_transactions import LedTransactions
from penstock.broker.replication.offsets import (
    delete_records,
    find_times,
    list_offsets,
    offset_for_leader_epoch,
)
from penstock.broker.replication.partition import FollowerFeed, Partition
from penstock.broker.replication.ports import (
    AlterPartition,
    AskCoordinator,
    LeadershipListener,
    LogStore,
    ReportReplicas,
    ShutListener,
    Step,
    StreamOpener,
)
from penstock.broker.replication.reporting import ReplicaReporter
from penstock.broker.replication.shared_reads import SharedReads
from penstock.v1 import common_pb2, log_pb2, metadata_pb2, replication_pb2
from penstock.wire.batch import Buffer
from penstock.wire.errors import (
    BrokerFencedError,
    PenstockError,
    StorageError,
)
from penstock.wire.ids import TopicIdPartition, TopicPartition
from penstock.wire.laden import Laden

logger = structlog.get_logger()


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class ReplicaManager:
    """Hosts the replicas that the metadata puts here. Used on one event loop.

    ``broker_epoch`` gives this process' registration (-1 before it has one), ``may_serve`` whether
    the broker's lease with the controllers stands. ``alter_partition`` raises PenstockError when
    it is not known whether the controllers took the change; so does ``report_replicas``.
    ``lag_max_ms`` is ``replica.lag.time.max.ms``, ``catch_up_bytes_per_second`` is
    ``replication.catchup.max.bytes.per.second``. LogStore's owner calls :meth:`on_durable`, the
    metadata feed :meth:`on_metadata` and the registration :meth:`on_registered`.
    """

    def __init__(
        self,
        node_id: int,
        logs: LogStore,
        image: MetadataImage,
        *,
        alter_partition: AlterPartition,
        report_replicas: ReportReplicas,
        broker_epoch: Callable[[], int],
        may_serve: Callable[[], bool],
        open_stream: StreamOpener,
        ask_coordinator: AskCoordinator,
        clock_ms: Callable[[], int] = _monotonic_ms,
        wall_clock_ms: Callable[[], int] = _wall_ms,
        lag_max_ms: int = 10_000,
        catch_up_bytes_per_second: int = UNLIMITED,
    ) -> None:
        self.node_id = node_id
        self.clock_ms = clock_ms
        self.catch_up_budget = CatchUpBudget(catch_up_bytes_per_second, clock_ms())
        self.lag_max_ms = lag_max_ms
        self.shared_reads = SharedReads()
        self._logs = logs
        self._image = image
        self._broker_epoch = broker_epoch
        self._may_serve = may_serve
        self._refusals = Refusals(node_id, image)
        self._listeners: list[LeadershipListener] = []
        self._on_isr_changed: Callable[[IsrChanged], None] = lambda _: None
        self._on_shut: ShutListener = lambda _key, _name, _error: None
        self._feeds: dict[int, tuple[int, FollowerFeed]] = {}
        self._feed_count = 0
        self._fetcher = Fetcher(self._locate_for_fetch)
        self._appends = Appends(
            node_id,
            self._locate,
            self._hosted,
            wall_clock_ms,
            clock_ms=clock_ms,
            ask_coordinator=ask_coordinator,
        )
        self.begin_append = self._appends.begin  # ``append`` for who does not want to wait.
        self.begin_transactional_append = self._appends.begin_transactional
        self.verify_transaction = self._appends.verify
        self.transactions = LedTransactions(
            node_id, image, self._locate, wall_clock_ms, on_mark=self._appends.marked
        )
        self.add_mark_listener = self.transactions.add_mark_listener
        self._deadlines = Deadlines(clock_ms, self._deadline_came)
        self._proposer = IsrProposer(node_id, broker_epoch, alter_partition, clock_ms)
        self._links = FollowerLinks(
            node_id,
            image,
            broker_epoch=broker_epoch,
            open_stream=open_stream,
            flush_soon=logs.flush_soon,
        )
        self._reporter = ReplicaReporter(node_id, image, broker_epoch, report_replicas)
        self._hosting = Hosting(
            node_id,
            logs,
            image,
            self,
            reporter=self._reporter,
            lag_max_ms=lag_max_ms,
            on_dropped=self._dropped,
        )

    async def start(self) -> None:
        """Ready to take metadata. Everything else begins with it."""

    async def stop(self) -> None:
        """End all streams and all waits. The logs are their owner's to close."""
        self._appends.stop()
        await self._links.stop()
        await self._proposer.stop()
        await self._reporter.stop()
        self._deadlines.stop()
        self._hosting.stop()
        for _, feed in list(self._feeds.values()):
            feed.close()
        for partition in self._hosting.partitions():
            partition.close()

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        """Call ``listener`` at every change of what this broker leads."""
        self._listeners.append(listener)

    def count_isr_changes(self, count: Callable[[IsrChanged], None]) -> None:
        """Call ``count`` at every change of the in-sync set of what this broker leads."""
        self._on_isr_changed = count

    def tell_of_shut_logs(self, listener: ShutListener) -> None:
        """Call ``listener`` for every log that can't be used, when it should be hosted."""
        self._on_shut = listener

    # --- What happens to this broker ----------------------------------------------------------

    def on_metadata(self, change: ImageChange) -> Iterator[Step]:
        """Act on what has just been applied to the image, a step each time that the next is asked
        for; a step is all that happens to one partition. The image must not change in between.
        What a step yields should be awaited: it spares the next ones waiting for the disk.

        Nothing is hosted before the image has reached this process' registration: an older one may
        still name an earlier process of this node as leader, whose log was longer than what this
        one found on its disk.
        """
        self._links.metadata_changed()  # A leader's new address is not to wait for all of it.
        yield from self._hosting.on_metadata(change, self._broker_epoch())
        self._reporter.resume()
        self._links.metadata_changed()

    def on_registered(self) -> None:
        """``broker_epoch`` has a new value. :meth:`catch_up` is due."""
        self._reporter.compare_all()
        self._links.metadata_changed()

    def catch_up(self) -> Iterator[Step]:
        """Host what the image has if it reached the registration before that was known, in steps as
        those of :meth:`on_metadata`, and never between them.
        """
        yield from self._hosting.catch_up(self._broker_epoch())
        self._links.metadata_changed()

    @property
    def is_settled(self) -> bool:
        """Whether this process hosts what is here, and the controllers know of what it can't serve.

        Before that it should not be let in: it could be made the leader of what it has not got.
        """
        return self._hosting.has_caught_up and self._reporter.is_settled

    def on_logs_failed(self, keys: Iterable[TopicIdPartition], error: StorageError) -> None:
        """The logs of these partitions can't be used any more: their disk has failed."""
        for key in keys:
            partition = self._hosting.get(key)
            if partition is not None:
                partition.fail(error)

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """A part of the log can't be read: others are to lead, and it is to be mended.

        It leaves the in-sync set if another replica in sync can lead; see ``may_mend``.
        """
        self._reporter.set_damaged(key, reason)

    def set_sound(self, key: TopicIdPartition) -> None:
        """The log was mended, or is here no more: it may be in sync again."""
        self._reporter.set_sound(key)

    def may_mend(self, key: TopicIdPartition) -> bool:
        """Whether the replica is out of the in-sync set, and another leads."""
        return log_copy.may_mend(self._image, key, self.node_id)

    def copy_anew(self, key: TopicIdPartition) -> bool:
        """Drop what the log holds, and have the leader send it again, if ``may_mend`` allows it.

        False when nothing was dropped.
        """
        partition = self._hosting.get(key)
        if partition is None or not self.may_mend(key):
            return False
        partition.handle(CopyAnew())
        return partition.log.log_end_offset == partition.log.log_start_offset

    def why_shut(self, key: TopicIdPartition) -> DamagedLogError | None:
        """Why the log of a replica that is here can't be used; None where it can."""
        reason = self._reporter.why_offline(key)
        return reason if isinstance(reason, DamagedLogError) else None

    def begin_anew(self, key: TopicIdPartition) -> Path | None:
        """Keep a log that can't be used aside, and have the leader send it to an empty one.

        The replica is damaged from then on, until ``was_copied``. Says where the old files are, or
        None, where ``may_mend`` does not allow it: nothing was done. Raises StorageError or
        DiskFullError where the disk can't do it.
        """
        error = self.why_shut(key)
        if error is None or not self.may_mend(key):
            return None
        return self._hosting.begin_anew(key, error)

    def was_copied(self, key: TopicIdPartition) -> None:
        """The log that ``begin_anew`` began has gone as far as it has to."""
        self._reporter.set_copied(key)

    @property
    def offline_count(self) -> int:
        """How many replicas can't be served. Safe on any thread."""
        return self._reporter.offline_count

    def on_durable(self, log: Log) -> None:
        """``log.durable_offset`` or ``log.durable_start_offset`` has moved."""
        partition = self._hosting.of_log(log)
        if partition is not None:
            partition.log_moved()
            partition.log_start_moved()
            self._links.durable(partition.key)

    def set_lag_max_ms(self, lag_max_ms: int) -> None:
        """``replica.lag.time.max.ms`` is another, for every partition."""
        self.lag_max_ms = lag_max_ms
        self._hosting.set_lag_max_ms(lag_max_ms)

    def set_catch_up_rate(self, bytes_per_second: int) -> None:
        """``replication.catchup.max.bytes.per.second`` is another."""
        self.catch_up_budget.set_rate(bytes_per_second, self.clock_ms())

    # --- What clients ask ---------------------------------------------------------------------

    async def append(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        records: Buffer,
        *,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        current_leader_epoch: int = -1,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """Append, and return once as many replicas hold it as ``acks`` asks for.

        As Appends.append says: calls (and tasks) append in their order. Raises the typed refusal.
        """
        return await self._appends.append(
            Target(topic, topic_id, partition, current_leader_epoch),
            records,
            acks,
            timeout_ms,
            verified=verified,
        )

    async def fetch(
        self, request: log_pb2.FetchRequest, room: Room = BOUNDLESS
    ) -> Laden[log_pb2.FetchResponse]:
        """Answer a fetch by long poll; see penstock.v1.FetchRequest."""
        return await self._fetcher.fetch(request, room)

    async def find_times(self, request: log_pb2.ListOffsetsRequest) -> None:
        """Read what an offset query needs of the disk, in threads. Raises nothing."""
        await find_times(request, self._locate_proto)

    def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        """Answer an offset query; see penstock.v1.ListOffsetsRequest and ``find_times``."""
        return list_offsets(request, self._locate_proto)

    def offset_for_leader_epoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        """Answer where leader epochs ended."""
        return offset_for_leader_epoch(request, self._locate_proto)

    async def delete_records(
        self, request: log_pb2.DeleteRecordsRequest
    ) -> log_pb2.DeleteRecordsResponse:
        """Move log starts up; answered when the in-sync replicas have followed."""
        return await delete_records(request, self._locate_proto)

    # --- What coordinators ask ----------------------------------------------------------------

    def leader_epoch_of(self, topic: str, partition: int) -> int | None:
        """The leader epoch that this broker leads the partition in, or None."""
        found = self._hosted_by_name(topic, partition)
        return found.replica.leader_epoch if found is not None and found.is_leader else None

    def high_watermark(self, topic: str, partition: int) -> int:
        """The high watermark of a partition led here. Raises NotLeaderError and the like."""
        return self._locate(topic, b"", partition).replica.high_watermark

    def log_end_offset(self, topic: str, partition: int) -> int:
        """The log end offset of a partition led here. Raises NotLeaderError and the like."""
        return self._locate(topic, b"", partition).log.log_end_offset

    def log_start_offset(self, topic: str, partition: int) -> int:
        """The first offset of a partition hosted here, or -1."""
        found = self._hosted_by_name(topic, partition)
        return -1 if found is None else found.log.log_start_offset

    def read_log(
        self, topic: str, partition: int, offset: int, max_bytes: int, *, to_end: bool
    ) -> bytes:
        """Whole batches of a partition led here, from the one that holds ``offset``.

        Up to the log's end when ``to_end``, else up to the high watermark. At least one batch if
        there is any; empty when there is none. Raises NotLeaderError and what Log.read raises.
        """
        target = self._locate(topic, b"", partition)
        below = target.log.log_end_offset if to_end else target.replica.high_watermark
        return bytes(target.log.read(offset, max_bytes, below=below, min_one=True))

    async def wait_high_watermark(self, topic: str, partition: int, offset: int) -> None:
        """Return once the high watermark is at ``offset`` or above.

        Raises NotLeaderError and the like when this broker leads the partition no longer.
        """
        target = self._locate(topic, b"", partition)
        if target.replica.high_watermark < offset:
            await target.high_watermark_waiters.add(offset)

    def replica_ends(self, key: TopicIdPartition) -> Mapping[int, int] | None:
        """The log end offset of each replica of a partition led here, -1 where it is not known.

        None for a partition that is not led here.
        """
        found = self._hosting.get(key)
        if found is None or not found.is_leader:
            return None
        ends = {
            node_id: follower.log_end_offset
            for node_id, follower in found.replica.followers().items()
        }
        ends[self.node_id] = found.log.log_end_offset
        return ends

    def followers_out_of_sync(self, why: OutOfSync) -> int:
        """Followers of what is led here that are out of sync for that. In any thread."""
        now_ms = self.clock_ms()
        return sum(
            list(partition.replica.out_of_sync(now_ms).values()).count(why)
            for partition in self.partitions()
        )

    def why_out_of_sync(
        self, key: TopicIdPartition
    ) -> Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]:
        """Why replicas of a partition are not in sync, as far as is known here.

        As the leader: of every follower that is not. Else of this broker's own replica, if it can't
        be served, in sync or not.
        """
        found = self._hosting.get(key)
        if found is not None and found.is_leader:
            return standing.of_followers(found, self.clock_ms())
        return standing.of_own(self.node_id, key, self._reporter)

    def partitions(self) -> Iterator[Partition]:
        """Every partition hosted here, to look at."""
        return self._hosting.partitions()

    # --- What followers' streams ask (LeaderSide) ---------------------------------------------

    def hosted(self, key: TopicIdPartition) -> Partition | None:
        """The partition, if this broker has a replica of it."""
        return self._hosting.get(key)

    def check_follower(self, hello: replication_pb2.FollowerHello) -> None:
        """Raise a PenstockError unless this follower may be served."""
        admitting.check_follower(self.node_id, self._image, hello)

    def log_start_in(self, key: TopicIdPartition, leader_epoch: int) -> int:
        """Where the log of a partition begins that is led here in this epoch."""
        return self._led_in(key, leader_epoch).log_start_offset

    async def read_batches(
        self, key: TopicIdPartition, leader_epoch: int, offset: int, max_bytes: int
    ) -> bytes:
        """Whole, verified batches from ``offset`` on, of a partition led here in this epoch.

        A follower that is to be copied anew reads a whole log in this way, so what is not in memory
        is read in a thread.
        """
        log = self._led_in(key, leader_epoch)
        job = log.cold_read(offset, max_bytes)
        if job is not None:
            await warm(job)
            log = self._led_in(key, leader_epoch)  # It may be another one's by now.
        return bytes(log.read(offset, max_bytes, below=log.log_end_offset, min_one=True))

    def _led_in(self, key: TopicIdPartition, leader_epoch: int) -> Log:
        found = self._hosting.get(key)
        if found is None:
            raise self._refusals.not_leader(key)
        found.check_leading()
        self._refusals.check_leader_epoch(
            found.name, asked=leader_epoch, current=found.replica.leader_epoch, key=key
        )
        return found.log

    def add_feed(self, node_id: int, feed: FollowerFeed) -> int:
        """A stream begins; its number. An earlier one of the same node is closed."""
        for _, earlier in [entry for entry in self._feeds.values() if entry[0] == node_id]:
            earlier.close()
        self._feed_count += 1
        self._feeds[self._feed_count] = (node_id, feed)
        return self._feed_count

    def remove_feed(self, session: int) -> None:
        """The stream is over."""
        self._feeds.pop(session, None)

    # --- What partitions ask (Host) -----------------------------------------------------------

    def feed(self, session: int) -> FollowerFeed | None:
        """The follower's stream of this number, while it lives."""
        entry = self._feeds.get(session)
        return None if entry is None else entry[1]

    def appended(self, partition: Partition, info: AppendInfo) -> None:
        """A producer's records are in the log of a partition led here."""
        self.shared_reads.appended(partition, info)

    def flush_soon(self, log: Log) -> None:
        """Make appended records durable."""
        self._logs.flush_soon(log)

    def propose(self, partition: Partition) -> None:
        """Send the replica's pending proposal to the controllers."""
        self._proposer.enqueue(partition)

    def state_position(self, partition: Partition, *, pause: bool) -> None:
        """State the position to the leader."""
        self._links.state(partition.key, pause=pause)

    def high_watermark_changed(self, partition: Partition) -> None:
        """There is a new high watermark to keep."""
        self._logs.checkpoint_high_watermark(partition.key, partition.replica.high_watermark)

    def arm(self, partition: Partition) -> None:
        """The replica has a deadline."""
        self._deadlines.arm(partition)

    def not_leader(self, key: TopicIdPartition) -> PenstockError:
        """The error for requests to a partition that is not led here."""
        return self._refusals.not_leader(key)

    def offline(self, key: TopicIdPartition, reason: PenstockError) -> PenstockError:
        """The error for requests to a partition whose replica here can't be served."""
        return self._refusals.offline(key, reason)

    def log_failed(self, partition: Partition, error: StorageError) -> None:
        """The replica can't be served, for as long as this process lives or until it is copied."""
        self._reporter.set_offline(partition.key, error)
        if isinstance(error, DamagedLogError):
            self._on_shut(partition.key, partition.name, error)

    def log_is_shut(
        self, key: TopicIdPartition, name: TopicPartition, error: DamagedLogError
    ) -> None:
        """The replica's log can't be used, and there is no partition of it here."""
        self._on_shut(key, name, error)

    def records_lost(self) -> None:
        """A disk of this broker lost records that it had confirmed."""
        self._logs.doubt_run()

    def isr_changed(self, change: IsrChanged) -> None:
        """Have it counted."""
        self._on_isr_changed(change)

    def role_changed(self, partition: Partition, was_leader_in: int) -> None:
        """The replica has another role or epoch; ``was_leader_in``: the epoch it led in, or -1."""
        if partition.replica.role is Role.FOLLOWER:
            self._links.follow(partition)
        else:
            self._links.unfollow(partition.key)
        if was_leader_in >= 0:
            self._appends.leadership_ended(partition.key, self.not_leader(partition.key))
            self._tell_listeners(partition, was_leader_in, leading=False)
        if partition.is_leader:
            self._tell_listeners(partition, partition.replica.leader_epoch, leading=True)

    # --- Inside -------------------------------------------------------------------------------

    def _dropped(self, partition: Partition) -> None:
        self._links.unfollow(partition.key)
        self._proposer.forget(partition)
        self.shared_reads.forget(partition)
        self._appends.leadership_ended(partition.key, self.not_leader(partition.key))
        if partition.is_leader:
            self._tell_listeners(partition, partition.replica.leader_epoch, leading=False)

    def _tell_listeners(self, partition: Partition, leader_epoch: int, *, leading: bool) -> None:
        for listener in self._listeners:
            try:
                listener(partition.name.topic, partition.name.partition, leader_epoch, leading)
            except Exception:
                # A listener's fault must not leave the other partitions behind the metadata.
                logger.exception("leadership listener failed", partition=str(partition.name))

    def _deadline_came(self, partition: Partition) -> None:
        if self._hosting.get(partition.key) is partition:
            partition.handle(Tick(self.clock_ms()))

    def _hosted(self, key: TopicIdPartition) -> Partition | None:
        return self._hosting.get(key)

    def _hosted_by_name(self, topic: str, partition: int) -> Partition | None:
        found = self._image.topic(topic)
        if found is None:
            return None
        return self._hosting.get(TopicIdPartition(found.topic_id, partition))

    def _locate(
        self, topic: str, topic_id: bytes, partition: int, current_leader_epoch: int = -1
    ) -> Partition:
        """The partition, when this broker leads it, in the epoch asked for, and may serve."""
        if not self._may_serve():
            raise BrokerFencedError(
                f"broker {self.node_id} has lost contact with the controllers and serves nothing "
                "until it is back; ask another broker for the leader"
            )
        key, _ = self._refusals.locate(topic, topic_id, partition)
        found = self._hosting.get(key)
        if found is None:
            reason = self._reporter.why_offline(key)
            if reason is not None:
                raise self._refusals.offline(key, reason)
            raise self._refusals.not_leader(key)
        found.check_leading()
        self._refusals.check_leader_epoch(
            found.name, asked=current_leader_epoch, current=found.replica.leader_epoch, key=key
        )
        return found

    def _locate_proto(
        self, where: common_pb2.TopicPartition, current_leader_epoch: int = -1
    ) -> Partition:
        return self._locate(where.topic, where.topic_id, where.partition, current_leader_epoch)

    def _locate_for_fetch(self, request: log_pb2.FetchPartition) -> Partition:
        return self._locate_proto(request.partition, request.current_leader_epoch)
