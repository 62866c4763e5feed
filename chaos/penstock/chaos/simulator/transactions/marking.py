"""Marks on their way from a coordinator to the leaders, each again and again until it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_values import Participant
from penstock.chaos.simulator.transactions.leading import partition_message
from penstock.v1 import coordination_pb2
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker

_TIMEOUT_MS: Final = 1000
_RETRY_MS: Final = (10, 100)


def needs_none(broker: SimulatedBroker, key: TopicIdPartition) -> bool:
    """Whether a partition is gone, as a broker knows it. Tests of the checkers put a bug here."""
    return broker.image.was_deleted(key.topic_id)


class Marks:
    """The marks that one coordinator's leadership has to write. ``done`` hears of each."""

    def __init__(
        self, broker: SimulatedBroker, leader_epoch: int, done: Callable[[MarkDone], None]
    ) -> None:
        self._broker = broker
        self._leader_epoch = leader_epoch
        self._done = done
        self._sending: set[tuple[str, int, int, Participant]] = set()
        self._closed = False

    def close(self) -> None:
        """Another coordinator sees to them."""
        self._closed = True

    def send(self, mark: Mark) -> None:
        """Have a mark written to all of its partitions, unless that is under way."""
        for participant in sorted(mark.partitions):
            what = mark.transactional_id, mark.producer_id, mark.producer_epoch, participant
            if what not in self._sending:
                self._sending.add(what)
                self._send(mark, participant)

    def _send(self, mark: Mark, participant: Participant) -> None:
        if self._closed:
            return
        broker = self._broker
        key = TopicIdPartition(participant.topic_id, participant.partition)
        record = broker.image.partition_by_id(key)
        if record is None and needs_none(broker, key):
            self._answered(mark, participant, is_done=True)
            return
        if record is None or record.leader < 0:
            self._again(mark, participant)
            return
        request = coordination_pb2.WriteMarkersRequest()
        request.markers.add(
            producer_id=mark.producer_id,
            producer_epoch=mark.producer_epoch,
            commit=mark.commit,
            coordinator_epoch=self._leader_epoch,
            partitions=[partition_message(key, participant.topic)],
            kept=[0] if participant in mark.kept else [],
        )
        broker.transactions.passes("mark sent")

        def told(response: Any) -> None:
            written = isinstance(response, coordination_pb2.WriteMarkersResponse)
            is_done = written and response.results[0].outcomes[0].code == 0
            self._answered(mark, participant, is_done=is_done)

        broker.transactions.ask_broker(
            record.leader, "write markers", request, told, timeout_ms=_TIMEOUT_MS
        )

    def _answered(self, mark: Mark, participant: Participant, *, is_done: bool) -> None:
        if self._closed:
            return
        if not is_done:
            self._again(mark, participant)
            return
        what = mark.transactional_id, mark.producer_id, mark.producer_epoch, participant
        self._sending.discard(what)
        self._broker.transactions.passes("mark answered")
        self._done(
            MarkDone(
                mark.transactional_id,
                mark.producer_id,
                mark.producer_epoch,
                frozenset([participant]),
            )
        )

    def _again(self, mark: Mark, participant: Participant) -> None:
        self._broker.after(
            self._broker.rng.randint(*_RETRY_MS), lambda: self._send(mark, participant)
        )
