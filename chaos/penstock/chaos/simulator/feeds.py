"""The leader's side of the streams between brokers in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.core.partition_events import FollowerAcked, FollowerPositioned
from penstock.broker.core.ports import EpochEnd
from penstock.chaos.simulator.messages import Ack, Hello, Position, Push, Pushes, Stop
from penstock.wire.errors import CorruptRecordError, ErrorCode, OffsetOutOfRangeError
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import iter_batches

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.network import End
    from penstock.chaos.simulator.partition import SimulatedPartition

_MAX_IN_FLIGHT: Final = 2
_PUSH_BYTES: Final = 600  # A few batches: a backlog takes several pushes.
_MARKS_LINGER_MS: Final = 20
_CLOSING_MS: Final = (0, 40)


@dataclass(slots=True)
class _Cursor:
    next_offset: int
    leader_epoch: int
    marks: tuple[int, int] = (-1, -1)


class Feed:
    """One follower's stream at its leader. ``session`` counts those that said whose they are."""

    def __init__(self, broker: SimulatedBroker, end: End) -> None:
        self.session = -1
        self.node_id = -1
        self._broker = broker
        self._end = end
        self._broker_epoch = -1
        self._cursors: dict[TopicIdPartition, _Cursor] = {}
        self._stated: dict[TopicIdPartition, int] = {}
        self._growing: dict[TopicIdPartition, None] = {}
        self._marks: dict[TopicIdPartition, None] = {}
        self._answers: list[Push] = []
        self._unanswered: set[int] = set()
        self._sequence = 0
        self._lingering = False
        end.on_message = self._received
        end.on_broken = lambda: broker.feeds.remove(self.session)

    def close(self) -> None:
        """End the stream."""
        self._end.close()

    def ended(self) -> None:
        """Push nothing more: what it pushed may be hosted here no longer."""
        for known in (self._cursors, self._growing, self._marks):
            known.clear()

    def start(self, partition: SimulatedPartition, offset: int) -> None:
        """Push from ``offset`` on."""
        self._cursors[partition.key] = _Cursor(offset, partition.replica.leader_epoch)
        self._growing[partition.key] = None
        self._pump()

    def answer(self, key: TopicIdPartition, **what: object) -> None:
        """Say something else than records, in the epoch that the follower stated."""
        self._forget(key)
        push = Push(key, self._stated.get(key, -1), **what)  # type: ignore[arg-type]
        self._answers.append(push)
        self._pump()

    def records_ready(self, key: TopicIdPartition) -> None:
        """The log has grown."""
        if key in self._cursors:
            self._growing[key] = None
            self._pump()

    def marks_ready(self, key: TopicIdPartition) -> None:
        """The high watermark or the log start moved: it may wait for records to go with."""
        if key in self._cursors:
            self._marks[key] = None
            if not self._lingering:
                self._lingering = True
                self._broker.after(_MARKS_LINGER_MS, self._linger_is_over)

    def _linger_is_over(self) -> None:
        self._lingering = False
        self._pump()

    def _forget(self, key: TopicIdPartition) -> None:
        for known in (self._cursors, self._growing, self._marks):
            known.pop(key, None)

    def _received(self, message: Hello | Position | Stop | Ack) -> None:
        if not self._broker.alive:
            return
        match message:
            case Hello(node_id, broker_epoch):
                self.node_id, self._broker_epoch = node_id, broker_epoch
                self._broker.feeds.greeted(self)
                known = self._broker.image.brokers.get(node_id)
                if known is not None and broker_epoch < known.broker_epoch:
                    self.close()
            case Position():
                self._positioned(message)
            case Stop(key):
                self._forget(key)
            case Ack(sequence, entries):
                self._unanswered.discard(sequence)
                for entry in entries:
                    self._acked(*entry)
                self._pump()

    def _positioned(self, position: Position) -> None:
        self._stated[position.key] = position.leader_epoch
        partition = self._broker.partitions.get(position.key)
        if partition is None:
            self.answer(position.key, error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return
        partition.handle(
            FollowerPositioned(
                node_id=self.node_id,
                session=self.session,
                broker_epoch=self._broker_epoch,
                leader_epoch=position.leader_epoch,
                log_end_offset=position.log_end_offset,
                last_epoch=position.last_epoch,
                log_start_offset=position.log_start_offset,
                now_ms=self._broker.now_ms,
                knows_no_producers=position.knows_no_producers,
            )
        )

    def _acked(self, key: TopicIdPartition, leader_epoch: int, end: int, start: int) -> None:
        partition = self._broker.partitions.get(key)
        if partition is not None:
            partition.handle(
                FollowerAcked(
                    node_id=self.node_id,
                    session=self.session,
                    leader_epoch=leader_epoch,
                    log_end_offset=end,
                    log_start_offset=start,
                    now_ms=self._broker.now_ms,
                )
            )

    def _pump(self) -> None:
        while len(self._unanswered) < _MAX_IN_FLIGHT:
            pushes = [self._completed(answer) for answer in self._answers]
            self._answers = []
            for key in list(self._growing):
                del self._growing[key]
                pushes += self._records_of(key)
            if pushes or not self._lingering:
                pushes += self._marks_to_tell()
            if not pushes:
                return
            self._sequence += 1
            self._unanswered.add(self._sequence)
            self._end.send(Pushes(self._sequence, tuple(pushes)))

    def _completed(self, answer: Push) -> Push:
        """Hand over what is known of producers to who begins anew, as it is when that is sent."""
        if answer.diverging is None or answer.diverging.leader_epoch >= 0:
            return answer
        partition = self._broker.partitions.get(answer.key)
        if (
            partition is None
            or not partition.is_leader
            or partition.replica.leader_epoch != answer.leader_epoch
        ):
            return answer._replace(diverging=None, error=ErrorCode.NOT_LEADER)
        below = answer.diverging.end_offset
        return answer._replace(producers=partition.log.producers_below(below))

    def _records_of(self, key: TopicIdPartition) -> list[Push]:
        cursor = self._cursors[key]
        partition = self._broker.partitions[key]
        log = partition.log
        try:
            records = log.read(cursor.next_offset, _PUSH_BYTES, below=log.log_end_offset)
        except OffsetOutOfRangeError:
            self._forget(key)
            restart = EpochEnd(-1, log.log_start_offset)
            return [self._completed(Push(key, self._stated[key], diverging=restart))]
        except CorruptRecordError as error:
            self._forget(key)
            partition.read_failed(error)
            return [Push(key, self._stated[key], error=error.code)]
        if not records and cursor.marks[0] >= 0:
            return []
        push = self._push(partition, cursor, records)
        for header, _ in iter_batches(records):
            cursor.next_offset = header.next_offset
        if cursor.next_offset < log.log_end_offset:
            self._growing[key] = None
        return [push]

    def _marks_to_tell(self) -> list[Push]:
        pushes = []
        for key in list(self._marks):
            del self._marks[key]
            cursor, partition = self._cursors[key], self._broker.partitions[key]
            if cursor.marks != (partition.replica.high_watermark, partition.log.log_start_offset):
                pushes.append(self._push(partition, cursor, b""))
        return pushes

    @staticmethod
    def _push(partition: SimulatedPartition, cursor: _Cursor, records: bytes) -> Push:
        cursor.marks = (partition.replica.high_watermark, partition.log.log_start_offset)
        return Push(partition.key, cursor.leader_epoch, *cursor.marks, cursor.next_offset, records)


class Feeds:
    """The streams of a broker's followers, by session."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._feeds: dict[int, Feed] = {}
        self._count = 0

    def accept(self, end: End) -> None:
        """A follower opened a stream."""
        Feed(self._broker, end)

    def greeted(self, feed: Feed) -> None:
        """A stream said whose it is: earlier ones of the same node end.

        They are read until then, so that what came on them counts among what comes on this one.
        """
        for session, other in list(self._feeds.items()):
            if other.node_id == feed.node_id and other is not feed:
                delay_ms = self._broker.rng.randint(*_CLOSING_MS)
                self._broker.after(delay_ms, partial(self._close, session))
        self._count += 1
        feed.session = self._count
        self._feeds[feed.session] = feed

    def _close(self, session: int) -> None:
        feed = self._feeds.get(session)
        if feed is not None:
            feed.close()
            self.remove(session)

    def remove(self, session: int) -> None:
        """A stream is over."""
        feed = self._feeds.pop(session, None)
        if feed is not None:
            feed.ended()
            for partition in self._broker.partitions.values():
                if partition.feeds.get(feed.node_id) == session:
                    del partition.feeds[feed.node_id]

    def start(self, session: int, partition: SimulatedPartition, offset: int) -> bool:
        """Push to the follower; whether its stream lives."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.start(partition, offset)
        return feed is not None

    def diverge(self, session: int, partition: SimulatedPartition, end: EpochEnd) -> None:
        """Tell the follower to cut."""
        if session in self._feeds:
            self._feeds[session].answer(partition.key, diverging=end)

    def refuse(self, session: int, partition: SimulatedPartition, code: ErrorCode) -> None:
        """Tell the follower that it is not served."""
        if session in self._feeds:
            self._feeds[session].answer(partition.key, error=code)

    def records_ready(self, session: int, partition: SimulatedPartition) -> None:
        """The log has grown."""
        if session in self._feeds:
            self._feeds[session].records_ready(partition.key)

    def marks_ready(self, session: int, partition: SimulatedPartition) -> None:
        """The marks moved."""
        if session in self._feeds:
            self._feeds[session].marks_ready(partition.key)
