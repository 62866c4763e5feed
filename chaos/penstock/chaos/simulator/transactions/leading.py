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
    Question,
    Refuse,
    Tick,
    Verification,
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


class Leading:
    """The leader's part of one broker, as penstock.broker.replication has it in production."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._core: Verification[_Held] = Verification()
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
            )
        )

    def role_changed(self, partition: SimulatedPartition) -> None:
        """Another leads, or this one in another epoch: what waits was for the one before."""
        self._handle(LeadershipEnded(partition.key, NotLeaderError("led by another, or anew")))

    def _handle(self, event: Event[_Held]) -> None:
        for effect in self._core.handle(event, self._broker.now_ms):
            match effect:
                case Ask(question, attempt):
                    self._ask(question, attempt)
                case Append(held, verified):
                    self._append(held, verified=verified)
                case Refuse(held, error):
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
        request.entries.add(
            transactional_id=question.transactional_id,
            producer_id=question.producer_id,
            producer_epoch=question.producer_epoch,
            partitions=[partition_message(question.partition)],
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
        self._handle(Answered(question, attempt, error))

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
            self._write_marker(key, mark, partial(done, at, within))

    def _write_marker(
        self, key: TopicIdPartition, marker: Marker, done: Callable[[ErrorCode | None], None]
    ) -> None:
        partition = self._broker.partitions.get(key)
        if partition is None or not partition.is_leader or not self._broker.may_serve():
            done(ErrorCode.NOT_LEADER)
            return
        try:
            partition.append_marker(marker, done)
        except PenstockError as error:
            done(error.code)
        else:
            self._broker.transactions.passes("mark appended")


def partition_message(key: TopicIdPartition) -> common_pb2.TopicPartition:
    """A partition as messages name it."""
    return common_pb2.TopicPartition(topic_id=key.topic_id, partition=key.partition)
