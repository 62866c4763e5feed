"""What a broker in the simulator answers to clients, and to who mends a log with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.wire.errors import ErrorCode, PenstockError
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.memory_log import MemoryLog
    from penstock.chaos.simulator.partition import SimulatedPartition
    from penstock.chaos.simulator.repair import ReadBatches

ACKS_ALL: Final = -1

METHODS: Final = frozenset(
    {
        "init producer id",
        "end transaction",
        "abort transaction",
        "begin attempt",
        "commit group",
        "last committed",
        "add partitions",
        "write markers",
        "commit transaction offsets",
        "fetch offsets",
    }
)
"""What a broker is asked about transactions, by clients and by other brokers."""


class ProduceRequest(NamedTuple):
    """Batches for one partition. ``acks`` is 0, 1 or -1, which is all; 0 gets no answer.

    ``transactional_id``: of the transaction that they are of, or empty.
    """

    key: TopicIdPartition
    records: bytes
    acks: int
    transactional_id: str = ""


class FetchRequest(NamedTuple):
    """What lies at an offset, if the broker leads in the epoch that the client knows (KIP-320).

    ``committed_only``: nothing of transactions that are not decided, and who is aborted.
    """

    key: TopicIdPartition
    offset: int
    leader_epoch: int
    committed_only: bool = False
    max_bytes: int = 800


class Answer(NamedTuple):
    """To a client: an error, or an offset or records. The leader is a hint, -1 when unknown."""

    error: ErrorCode | None = None
    base_offset: int = -1
    records: bytes = b""
    leader: int = -1
    leader_epoch: int = -1
    high_watermark: int = -1
    log_start_offset: int = -1
    log_end_offset: int = -1
    last_stable_offset: int = -1
    aborted: tuple[tuple[int, int], ...] = ()  # Producer ids and first offsets.


def serve(broker: SimulatedBroker, method: str, request: Any, reply: Callable[[Any], None]) -> None:
    """Answer a client."""
    if method == "metadata":
        record = broker.image.partition_by_id(request)
        if record is None:
            reply(Answer(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        else:
            reply(Answer(leader=record.leader, leader_epoch=record.leader_epoch))
        return
    if method in METHODS:
        broker.transactions.serve(method, request, reply)
        return
    partition = broker.partitions.get(request.key)
    if method == "read batches":
        _read_batches(partition, request, reply)
    elif not broker.may_serve():
        reply(Answer(ErrorCode.BROKER_FENCED))
    elif partition is None:
        reply(Answer(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    elif not partition.is_leader:
        replica = partition.replica
        code = ErrorCode.NOT_LEADER
        reply(Answer(code, leader=replica.leader, leader_epoch=replica.leader_epoch))
    elif method == "produce" and request.transactional_id:
        broker.transactions.produce(partition, request, reply)
    elif method == "produce":
        _produce(partition, request, reply)
    else:
        _fetch(partition, request, reply)


def _produce(
    partition: SimulatedPartition, request: ProduceRequest, reply: Callable[[Any], None]
) -> None:
    if request.acks == ACKS_ALL and partition.replica.under_min_isr:
        reply(Answer(ErrorCode.NOT_ENOUGH_REPLICAS))
        return

    def done(base_offset: int, error: ErrorCode | None) -> None:
        reply(Answer(error, base_offset))

    try:
        partition.append(request.records, acks=request.acks, on_done=done)
    except PenstockError as error:
        reply(Answer(error.code))


def _read_batches(
    partition: SimulatedPartition | None, request: ReadBatches, reply: Callable[[Any], None]
) -> None:
    """What another replica is to be mended with."""
    if partition is None or not partition.is_leader:
        reply(Answer(ErrorCode.NOT_LEADER))
    elif request.leader_epoch != partition.replica.leader_epoch:
        reply(Answer(ErrorCode.FENCED_LEADER_EPOCH))
    else:
        log = partition.log
        start = log.log_start_offset
        try:
            records = log.read(request.offset, request.max_bytes, below=log.log_end_offset)
        except PenstockError as error:
            partition.read_failed(error)
            reply(Answer(error.code, log_start_offset=start))
        else:
            reply(Answer(records=records, log_start_offset=start))


def _fetch(
    partition: SimulatedPartition, request: FetchRequest, reply: Callable[[Any], None]
) -> None:
    if request.leader_epoch != partition.replica.leader_epoch:
        reply(Answer(ErrorCode.FENCED_LEADER_EPOCH))
        return
    log, high_watermark = partition.log, partition.replica.high_watermark
    stable = stable_offset(log, high_watermark)
    below = stable if request.committed_only else high_watermark
    try:
        records = log.read(request.offset, request.max_bytes, below=below)
        aborted = aborted_for(log, request.offset, below) if request.committed_only else ()
    except PenstockError as error:
        partition.read_failed(error)
        reply(Answer(error.code, log_start_offset=log.log_start_offset))
    else:
        reply(
            Answer(
                records=records,
                high_watermark=high_watermark,
                log_start_offset=log.log_start_offset,
                log_end_offset=log.log_end_offset,
                last_stable_offset=stable,
                aborted=aborted,
            )
        )


def stable_offset(log: MemoryLog, high_watermark: int) -> int:
    """Up to where a reader of committed records reads. Tests of the checkers put a bug here."""
    return log.last_stable_offset(high_watermark)


def aborted_for(log: MemoryLog, offset: int, below: int) -> tuple[tuple[int, int], ...]:
    """What such a reader is to leave out of a range. Tests of the checkers put a bug here."""
    found = log.aborted_transactions(offset, below=below)
    return tuple((one.producer_id, one.first_offset) for one in found)
