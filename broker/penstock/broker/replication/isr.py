"""Sends leaders' wishes for other in-sync sets to the controllers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from penstock.broker.core.partition_events import IsrProposal, PartitionState, ProposalAnswered
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.ports import AlterPartition
from penstock.broker.replication.sending import SendLoop
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode, PenstockError, error_from_proto
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()

MAX_BATCH: Final = 1000
"""Partitions in one request at most."""


class IsrProposer:
    """One request in flight at a time; what waits meanwhile goes together in the next.

    A proposal is the replica's: as long as its outcome is unknown it stays the same and is sent
    again; once the replica has dropped it (the metadata settled it, the leadership ended) it is
    sent no more.
    """

    def __init__(
        self,
        node_id: int,
        broker_epoch: Callable[[], int],
        alter_partition: AlterPartition,
        clock_ms: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._alter_partition = alter_partition
        self._clock_ms = clock_ms
        self._waiting: dict[TopicIdPartition, Partition] = {}
        self._sending = SendLoop(self._next_batch, self._send)

    def enqueue(self, partition: Partition) -> None:
        """The partition's replica has a proposal to make."""
        self._waiting[partition.key] = partition
        self._sending.wake()

    def forget(self, partition: Partition) -> None:
        """The partition is no longer hosted here."""
        self._waiting.pop(partition.key, None)

    async def stop(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        await self._sending.stop()

    def _next_batch(self) -> list[tuple[Partition, IsrProposal]] | None:
        batch: list[tuple[Partition, IsrProposal]] = []
        for key, partition in list(self._waiting.items()):
            pending = partition.replica.pending
            if pending is None:
                del self._waiting[key]
            elif len(batch) < MAX_BATCH:
                batch.append((partition, pending))
        return batch or None

    async def _send(self, batch: Sequence[tuple[Partition, IsrProposal]]) -> bool:
        """Send one request; whether every outcome in it is known now."""
        command = cluster_pb2.AlterPartitionCommand(
            node_id=self._node_id,
            broker_epoch=self._broker_epoch(),
            partitions=[_entry(partition, proposal) for partition, proposal in batch],
        )
        try:
            response = await self._alter_partition(command)
            if response.HasField("error"):
                raise error_from_proto(response.error)
        except PenstockError as error:
            logger.warning(
                "in-sync change not answered", partitions=len(batch), error=error.message
            )
            return False
        except Exception:
            # Whatever it was, the wish must not be forgotten with it.
            logger.exception("in-sync change failed", partitions=len(batch))
            return False
        results = response.result.partitions
        if len(results) != len(batch):
            logger.error("in-sync change answered in part", sent=len(batch), got=len(results))
            return False
        for (partition, proposal), result in zip(batch, results, strict=True):
            self._answered(partition, proposal, result)
        return all(
            partition.closed or partition.replica.pending is not proposal
            for partition, proposal in batch
        )

    def _answered(
        self,
        partition: Partition,
        proposal: IsrProposal,
        result: cluster_pb2.AlterPartitionEntryResult,
    ) -> None:
        error: ErrorCode | None = None
        if result.HasField("error"):
            refusal = error_from_proto(result.error)
            error = refusal.code
            logger.info(
                "in-sync change refused",
                partition=str(partition.name),
                isr=sorted(proposal.isr),
                error=refusal.message,
            )
        state = (
            PartitionState.from_record(result.partition) if result.HasField("partition") else None
        )
        partition.handle(ProposalAnswered(proposal, error, state, self._clock_ms()))


def _entry(partition: Partition, proposal: IsrProposal) -> cluster_pb2.AlterPartitionEntry:
    return cluster_pb2.AlterPartitionEntry(
        topic_id=partition.key.topic_id,
        partition=partition.key.partition,
        leader_epoch=proposal.leader_epoch,
        partition_epoch=proposal.partition_epoch,
        new_isr=[
            cluster_pb2.IsrMember(node_id=node_id, broker_epoch=broker_epoch)
            for node_id, broker_epoch in proposal.members
        ],
    )
