"""What a leader does for transactions: it asks before it appends, and writes their marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.core.transactions import Marker
from penstock.broker.core.verification import (
    Answered,
    Append,
    Arrived,
    Ask,
    Event,
    LeadershipEnded,
    Marked,
    Question,
    Refuse,
    Tick,
    Verification,
    is_behind,
)
from penstock.chaos.simulator.serving import ACKS_ALL, Answer, ProduceRequest
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.errors import (
    ErrorCode,
    NotLeaderError,
    PenstockError,
    RequestTimedOutError,
    error_from_proto,
)
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.records import parse_header

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.partition import SimulatedPartition
    from penstock.chaos.simulator.scheduler import Timer

_PRODUCE_TIMEOUT_MS: Final = 900
_ASK_TIMEOUT_MS: Final = 500


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch that waits for its coordinator, and who waits for it."""

    request: ProduceRequest
    reply: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who waits for the coordinator's word and appends by itself."""

    done: Callable[[ErrorCode | None], None]


class Leading:
    """The leader's part of one broker, as penstock.broker.replication has it in production."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._core: Verification[_Held | _Asked] = Verification()
        self._timer: Timer | None = None

    # Batches.

    def produce(
        self,
        partition: SimulatedPartition,
        request: ProduceRequest,
        reply: Callable[[Any], None],
    ) -> None:
        """Append batches of a transaction, or find out first whether they may be."""
        header = parse_header(request.records)
        question = Question(
            partition.key, request.transactional_id, header.producer_id, header.producer_epoch
        )
        self._handle(
            Arrived(
                question,
                _Held(request, reply),
                partition.log.has_open_transaction(header.producer_id, header.producer_epoch),
                len(request.records),
                self._broker.now_ms + _PRODUCE_TIMEOUT_MS,
                self._is_behind(question),
            )
        )

    def verify(
        self,
        partition: SimulatedPartition,
        transactional_id: str,
        producer: tuple[int, int],
        done: Callable[[ErrorCode | None], None],
    ) -> None:
        """Tell when a transaction may write to a partition, or why it may not."""
        if partition.replica.under_min_isr:
            done(ErrorCode.NOT_ENOUGH_REPLICAS)  # What can't be appended is not asked for.
            return
        question = Question(partition.key, transactional_id, *producer)
        is_open = partition.log.has_open_transaction(*producer)
        give_up_ms = self._broker.now_ms + _PRODUCE_TIMEOUT_MS
        self._handle(Arrived(question, _Asked(done), is_open, 0, give_up_ms))

    def role_changed(self, partition: SimulatedPartition) -> None:
        """Another leads, or this one in another epoch: what waits was for the one before."""
        self._handle(LeadershipEnded(partition.key, NotLeaderError("led by another, or anew")))

    def _handle(self, event: Event[_Held | _Asked]) -> None:
        for effect in self._core.handle(event, self._broker.now_ms):
            match effect:
                case Ask(question, attempt):
                    self._ask(question, attempt)
                case Append(held, verified):
                    if isinstance(held, _Asked):
                        held.done(None)
                    else:
                        self._append(held, verified=verified)
                case Refuse(held, error):
                    if isinstance(held, _Asked):
                        held.done(error.code)
                    else:
                        held.reply(Answer(error.code))
        self._core.validate()
        self._arm()

    def _append(self, held: _Held, *, verified: bool) -> None:
        header = parse_header(held.request.records)
        partition = self._broker.partitions.get(held.request.key)
        if partition is None or not partition.is_leader:
            held.reply(Answer(ErrorCode.NOT_LEADER))
            return
        if partition.replica.under_min_isr:
            held.reply(Answer(ErrorCode.NOT_ENOUGH_REPLICAS))
            return
        try:
            partition.append(
                held.request.records,
                acks=ACKS_ALL,
                on_done=lambda base_offset, error: held.reply(Answer(error, base_offset)),
                verified=(header.producer_id, header.producer_epoch) if verified else None,
            )
        except PenstockError as error:
            held.reply(Answer(error.code))

    def _ask(self, question: Question, attempt: int) -> None:
        request = coordination_pb2.AddPartitionsRequest()
        topic = self._broker.image.topic_by_id(question.partition.topic_id)
        request.entries.add(
            transactional_id=question.transactional_id,
            producer_id=question.producer_id,
            producer_epoch=question.producer_epoch,
            partitions=[partition_message(question.partition, "" if topic is None else topic.name)],
        )
        self._broker.transactions.passes("partition asked for")
        self._broker.transactions.ask_coordinator(
            question.transactional_id,
            "add partitions",
            request,
            partial(self._told, question, attempt),
            timeout_ms=_ASK_TIMEOUT_MS,
        )

    def _told(self, question: Question, attempt: int, response: Any) -> None:
        error: PenstockError | None
        if not isinstance(response, coordination_pb2.AddPartitionsResponse):
            error = RequestTimedOutError("no coordinator has answered")
        else:
            [result] = response.results
            error = error_from_proto(result.error) if result.HasField("error") else None
        self._broker.transactions.passes("partition answered")
        self._handle(Answered(question, attempt, error, self._is_behind(question)))

    def _is_behind(self, question: Question) -> bool:
        """Whether a transaction before is open in the log."""
        partition = self._broker.partitions.get(question.partition)
        return partition is not None and is_behind(
            partition.log.producers, question.producer_id, question.producer_epoch
        )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._core.next_deadline_ms
        if due_ms is not None:
            self._timer = self._broker.after(due_ms - self._broker.now_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    # Marks.

    def write_markers(
        self, request: coordination_pb2.WriteMarkersRequest, reply: Callable[[Any], None]
    ) -> None:
        """Write marks, and answer once all of them are committed, or can't be."""
        places = [
            (at, within, marker, TopicIdPartition(TopicId(place.topic_id), place.partition))
            for at, marker in enumerate(request.markers)
            for within, place in enumerate(marker.partitions)
        ]
        outcomes = [[common_pb2.Error() for _ in marker.partitions] for marker in request.markers]
        left = len(places)

        def answer() -> None:
            response = coordination_pb2.WriteMarkersResponse()
            for of_marker in outcomes:
                response.results.add(outcomes=of_marker)
            reply(response)

        def done(at: int, within: int, error: ErrorCode | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                outcomes[at][within].code = error
            if not left:
                answer()

        if not places:
            answer()
        for at, within, marker, key in places:
            mark = Marker(
                marker.producer_id, marker.producer_epoch, marker.commit, marker.coordinator_epoch
            )
            self._write_marker(key, mark, partial(done, at, within), kept=within in marker.kept)

    def _write_marker(
        self,
        key: TopicIdPartition,
        marker: Marker,
        done: Callable[[ErrorCode | None], None],
        *,
        kept: bool,
    ) -> None:
        partition = self._broker.partitions.get(key)
        if partition is None or not partition.is_leader or not self._broker.may_serve():
            done(ErrorCode.NOT_LEADER)
            return

        def on_marked() -> None:
            # First, as in a broker: what the mark lets in may be positions of the next transaction.
            self._broker.transactions.groups.marked(partition, marker)
            self._handle(Marked.of(partition.log.producers, key, marker, kept=kept))

        try:
            partition.append_marker(marker, done, on_marked=on_marked)
        except PenstockError as error:
            done(error.code)
        else:
            self._broker.transactions.passes("mark appended")


def partition_message(key: TopicIdPartition, topic: str) -> common_pb2.TopicPartition:
    """A partition as messages name it."""
    return common_pb2.TopicPartition(topic=topic, topic_id=key.topic_id, partition=key.partition)
