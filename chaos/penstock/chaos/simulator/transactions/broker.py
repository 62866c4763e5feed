"""What a broker in the simulator does for transactions: as leader, and as coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.core.group_partition import partition_for_group
from penstock.chaos.simulator.serving import Answer, ProduceRequest
from penstock.chaos.simulator.transactions import grouping
from penstock.chaos.simulator.transactions.coordinating import HostedTransactions
from penstock.chaos.simulator.transactions.leading import Leading
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.transactional_ids import coordinating_key

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.partition import SimulatedPartition

TRANSACTIONS_TOPIC: Final = "__transaction_state"
STEPS: Final = (
    "partition asked for",
    "partition answered",
    "record appended",
    "record committed",
    "coordinator answers",
    "mark sent",
    "mark appended",
    "mark answered",
    *grouping.STEPS,
)
"""What a transaction goes through, and a broker may end after."""

_RETRY_MS: Final = 50


def keyed_by(method: str, request: Any) -> str:
    """The name by whose hash the coordinator is found who is asked."""
    if method in ("begin attempt", "commit group", "last committed"):
        group: str = request.group
        return group
    asks = request.entries[0] if method == "add partitions" else request
    return coordinating_key(asks.transactional_id)


class Transactions:
    """One broker's. The partitions of the coordinators' topic that it leads, and its batches."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._leading = Leading(broker)
        self._hosted: dict[TopicIdPartition, HostedTransactions] = {}
        self.groups = grouping.Groups(broker, self._leading)

    def passes(self, step: str) -> None:
        """A step is done at which it may be the broker's fate to end."""
        self._broker.place.passes(self._broker.node_id, step)

    # What happens to replicas.

    def role_changed(self, partition: SimulatedPartition) -> None:
        """A replica leads or follows, or does so in another epoch."""
        self._leading.role_changed(partition)
        self.groups.role_changed(partition)
        before = self._hosted.pop(partition.key, None)
        if before is not None:
            before.close()
        topic = self._broker.image.topic_by_id(partition.key.topic_id)
        is_state = topic is not None and topic.name == TRANSACTIONS_TOPIC
        if is_state and partition.is_leader and not partition.closed:
            self._hosted[partition.key] = HostedTransactions(self._broker, partition)

    def closed(self, partition: SimulatedPartition) -> None:
        """A replica is hosted here no longer."""
        self._leading.role_changed(partition)
        self.groups.closed(partition)
        hosted = self._hosted.pop(partition.key, None)
        if hosted is not None:
            hosted.close()

    def topics_removed(self, topic_ids: frozenset[TopicId]) -> None:
        """Topics are deleted."""
        for hosted in list(self._hosted.values()):
            hosted.topics_removed(topic_ids)

    # Asking.

    def ask_coordinator(
        self,
        transactional_id: str,
        method: str,
        request: Any,
        on_answer: Callable[[Any], None],
        *,
        timeout_ms: int,
    ) -> None:
        """Ask whoever coordinates an id, by the own metadata. None is for no answer."""
        key = self._keeper(coordinating_key(transactional_id))
        record = None if key is None else self._broker.image.partition_by_id(key)
        leader = -1 if record is None else record.leader
        self.ask_broker(leader, method, request, on_answer, timeout_ms=timeout_ms)

    def ask_broker(
        self,
        node_id: int,
        method: str,
        request: Any,
        on_answer: Callable[[Any], None],
        *,
        timeout_ms: int,
    ) -> None:
        """Ask a broker, which may be this one."""
        broker = self._broker
        if node_id < 0:
            broker.after(_RETRY_MS, lambda: on_answer(None))
        elif node_id == broker.node_id:
            broker.after(0, lambda: self.serve(method, request, self._once(on_answer)))
        else:
            broker.place.network.call(
                broker, node_id, method, request, on_answer, timeout_ms=timeout_ms
            )

    def _once(self, on_answer: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda answer: on_answer(answer) if self._broker.alive else None

    def _keeper(self, name: str) -> TopicIdPartition | None:
        """The partition that keeps what a name hashes to."""
        topic = self._broker.image.topic(TRANSACTIONS_TOPIC)
        if topic is None or not topic.partitions:
            return None
        return TopicIdPartition(topic.topic_id, partition_for_group(name, len(topic.partitions)))

    # Serving.

    def produce(
        self,
        partition: SimulatedPartition,
        request: ProduceRequest,
        reply: Callable[[Any], None],
    ) -> None:
        """Append batches of a transaction, once its coordinator knows of the partition."""
        self._leading.produce(partition, request, reply)

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a client or another broker."""
        broker = self._broker
        if method == "write markers":
            self._leading.write_markers(request, reply)
            return
        if not broker.may_serve():
            reply(Answer(ErrorCode.BROKER_FENCED))
            return
        if method in grouping.METHODS:
            self.groups.serve(method, request, reply)
            return
        key = self._keeper(keyed_by(method, request))
        hosted = None if key is None else self._hosted.get(key)
        if hosted is not None:
            hosted.serve(method, request, reply)
            return
        record = None if key is None else broker.image.partition_by_id(key)
        if record is None:
            reply(Answer(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        else:
            code = ErrorCode.NOT_COORDINATOR
            reply(Answer(code, leader=record.leader, leader_epoch=record.leader_epoch))
