"""The follower's side of the streams between brokers in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.core.partition_events import Pushed, Role
from penstock.chaos.simulator.messages import Ack, Hello, Position, Pushes, Stop
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.network import End
    from penstock.chaos.simulator.partition import SimulatedPartition

_BACKOFF_MS: Final = (20, 150)


@dataclass(frozen=True, slots=True)
class Applied:
    """A push that a follower appended, in an epoch and up to an offset."""

    partition: SimulatedPartition
    leader_epoch: int
    end_offset: int

    @property
    def is_current(self) -> bool:
        """The replica is still here, and follows in the epoch of the push."""
        replica = self.partition.replica
        return (
            not self.partition.closed
            and replica.role is Role.FOLLOWER
            and replica.leader_epoch == self.leader_epoch
        )

    @property
    def is_settled(self) -> bool:
        """It is durable, or no matter of this leadership any more."""
        log = self.partition.log
        return not self.is_current or acknowledged_end(log) >= min(
            self.end_offset, log.log_end_offset
        )


def acknowledged_end(log: object) -> int:
    """What a follower may acknowledge: what is durable. Tests of the checkers put a bug here."""
    return log.durable_offset  # type: ignore[attr-defined,no-any-return]


class Link:
    """A follower's stream to one leader."""

    def __init__(self, broker: SimulatedBroker, leader: int) -> None:
        self.followed: dict[TopicIdPartition, int] = {}  # In which leader epochs.
        self._broker = broker
        self._leader = leader
        self._end: End | None = None
        self._to_state: dict[TopicIdPartition, None] = {}
        self._acks: list[tuple[int, tuple[Applied, ...]]] = []
        self._closed = False
        self._attempts = 0
        self._connect()

    def _connect(self) -> None:
        self._end = None
        if self._closed or self._broker.broker_epoch < 0:
            if not self._closed:
                self._broker.after(20, self._connect)
            return
        end = self._broker.connect(self._leader, "replication")
        end.on_message = lambda message: self._received(end, message)
        end.on_broken = lambda: self._broken(end)
        self._end = end
        self._acks.clear()
        self._to_state = dict.fromkeys(self.followed)
        end.send(Hello(self._broker.node_id, self._broker.broker_epoch))
        self.pump()

    def _broken(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self._broker.after(self._broker.rng.randint(*_BACKOFF_MS), self._connect)

    def close(self) -> None:
        """End the stream for good."""
        self._closed = True
        if self._end is not None:
            self._end.close()

    def renew(self) -> None:
        """End the stream and open another: this broker has another epoch."""
        if self._end is not None:
            self._end.close()
            self._connect()

    def follow(self, partition: SimulatedPartition) -> None:
        """Follow the partition."""
        self.followed[partition.key] = partition.replica.leader_epoch

    def unfollow(self, key: TopicIdPartition) -> None:
        """Follow it no longer."""
        if self.followed.pop(key, None) is not None:
            self._to_state.pop(key, None)
            if self._end is not None:
                self._end.send(Stop(key))
            self.pump()  # An ack may have waited for this partition alone.

    def state(self, key: TopicIdPartition, *, pause: bool) -> None:
        """State the partition's position, at once or later."""
        if key not in self.followed:
            return
        if pause:
            self._broker.after(
                self._broker.rng.randint(*_BACKOFF_MS), partial(self.state, key, pause=False)
            )
            return
        self._to_state[key] = None
        self.pump()

    def pump(self) -> None:
        """Send what is ready: acks of what is durable, in any order; positions of durable logs."""
        end = self._end
        if end is None:
            return
        settled = [ack for ack in self._acks if all(applied.is_settled for applied in ack[1])]
        self._acks = [ack for ack in self._acks if ack not in settled]
        for sequence, applied in settled:
            entries = tuple(
                (
                    entry.partition.key,
                    entry.leader_epoch,
                    acknowledged_end(entry.partition.log),
                    entry.partition.log.log_start_offset,
                )
                for entry in applied
                if entry.is_current
            )
            end.send(Ack(sequence, entries))
        for key in list(self._to_state):
            partition = self._broker.partitions[key]
            log = partition.log
            if acknowledged_end(log) < log.log_end_offset:
                partition.log_moved()  # Flush; it is stated once it is durable.
                continue
            del self._to_state[key]
            end.send(
                Position(
                    key,
                    self.followed[key],
                    log.log_end_offset,
                    log.last_epoch,
                    log.log_start_offset,
                    log.knows_no_producers,
                )
            )

    def _received(self, end: End, message: Pushes) -> None:
        if end is not self._end or not self._broker.alive:
            return
        applied: list[Applied] = []
        for push in message.pushes:
            if push.leader_epoch != self.followed.get(push.key):
                continue
            if push.error is not None:
                self.state(push.key, pause=True)
                continue
            partition = self._broker.partitions[push.key]
            partition.handle(
                Pushed(
                    leader_epoch=push.leader_epoch,
                    high_watermark=push.high_watermark,
                    log_start_offset=push.log_start_offset,
                    base_offset=push.base_offset,
                    records=push.records,
                    diverging=push.diverging,
                    producers=push.producers,
                )
            )
            if push.diverging is None:
                log_end = partition.log.log_end_offset
                applied.append(Applied(partition, push.leader_epoch, log_end))
        self._acks.append((message.sequence, tuple(applied)))
        self.pump()


class Links:
    """A broker's links, one to each broker that leads something here."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._links: dict[int, Link] = {}
        self._leader_of: dict[TopicIdPartition, int] = {}

    def follow(self, partition: SimulatedPartition) -> None:
        """Follow the partition at its leader, and nowhere else."""
        self.unfollow(partition.key)
        leader = partition.replica.leader
        if leader not in self._links:
            self._links[leader] = Link(self._broker, leader)
        self._leader_of[partition.key] = leader
        self._links[leader].follow(partition)

    def unfollow(self, key: TopicIdPartition) -> None:
        """Follow the partition no longer."""
        leader = self._leader_of.pop(key, None)
        if leader is not None:
            self._links[leader].unfollow(key)

    def state(self, partition: SimulatedPartition, *, pause: bool) -> None:
        """State the partition's position."""
        leader = self._leader_of.get(partition.key)
        if leader is not None:
            self._links[leader].state(partition.key, pause=pause)

    def durable(self, partition: SimulatedPartition) -> None:
        """The partition's log became durable further on."""
        leader = self._leader_of.get(partition.key)
        if leader is not None:
            self._links[leader].pump()

    def metadata_changed(self) -> None:
        """End the links that have no use."""
        for leader, link in list(self._links.items()):
            if not link.followed:
                link.close()
                del self._links[leader]

    def renew(self) -> None:
        """This broker has a new epoch."""
        for link in self._links.values():
            link.renew()
