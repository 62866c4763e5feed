"""What the parts of a node say to its probes: why it is not ready, and why it should not stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from penstock.broker.acting import SLICE_S
from penstock.broker.core.metadata_image import MetadataImage, replication_factor
from penstock.broker.core.rolling import (
    BrokerStanding,
    PartitionStanding,
    QuorumStanding,
    RollVerdict,
    VoterStanding,
    judge,
)
from penstock.raft_meta.quorum import QuorumStatus, Role
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.topic_config import effective_min_isr

QUORUM_MS: Final = 3_000
"""So long the controllers are asked how they stand."""
_NEWS_MS: Final = 1_000
"""What was decided is heard of within milliseconds; after so long something is wrong."""
_BEHIND_ENTRIES: Final = 1_000
"""A controller that has so much still to apply of what is committed is not caught up."""

DescribeQuorum = Callable[[int], Awaitable[controller_pb2.DescribeQuorumResponse]]


def why_controller_not_ready(status: QuorumStatus) -> str:
    """Why a controller has not joined its quorum; empty when it leads, or follows closely."""
    if status.leader_id < 0:
        return "the controller knows no leader of the quorum"
    # A follower takes no more to be decided than it has, however much more the leader has.
    decided = max(status.commit_index, status.leaders_commit_index)
    behind = decided - status.applied_index
    if behind > _BEHIND_ENTRIES:
        return f"the controller has {behind} entries of the metadata still to get or to apply"
    if status.role is not Role.LEADER and status.commit_index == 0:
        return f"the controller has heard nothing from the leader {status.leader_id} yet"
    return ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A broker's picture of the cluster."""

    image: MetadataImage
    wait_for_index: Callable[[int, int], Awaitable[None]]
    """Returns when the image has everything up to an index, or after so many milliseconds."""


class Rollable:
    """Says whether this node may be stopped. Used on one event loop.

    ``picture`` is None of a controller without a broker: it has no replicas.
    """

    def __init__(
        self,
        node_id: int,
        picture: Picture | None,
        describe_quorum: DescribeQuorum,
    ) -> None:
        self._node_id = node_id
        self._picture = picture
        self._describe_quorum = describe_quorum

    async def verdict(self) -> RollVerdict:
        """By the rule of penstock.broker.core.rolling, and this node's picture of the cluster.

        The picture has all that was decided before the question. By an older one, of before a drain
        or a death, two nodes could both be told that they may stop.
        """
        quorum, epoch, decided = await self._quorum()
        if self._picture is None:
            return judge(self._node_id, (), (), quorum)
        await self._picture.wait_for_index(decided, _NEWS_MS)
        image = self._picture.image
        known = image.index
        if known < 0:
            return RollVerdict(
                [f"node {self._node_id} has not heard of the metadata yet; next: ask again"]
            )
        if known < decided or image.controller_epoch < epoch:
            behind = (
                f"node {self._node_id} knows of the metadata up to index {known} of controller "
                f"epoch {image.controller_epoch}, and they have changed up to {decided} of "
                f"{epoch}; next: ask again; if it stays behind, see its log"
            )
            return RollVerdict([behind])
        # Before the partitions, which are collected in slices: what these miss can only be newer.
        brokers = [broker_standing(record) for record in image.brokers.values()]
        partitions = await self._partitions(image)
        return judge(self._node_id, partitions, brokers, quorum)

    async def _quorum(self) -> tuple[QuorumStanding, int, int]:
        """How the controllers stand; the epoch and the index up to which they had decided then.

        A picture of a lesser epoch may be of a history that was given up, whatever its index.
        """
        try:
            quorum = await self._describe_quorum(QUORUM_MS)
        except PenstockError as error:
            return QuorumStanding((), error.message.partition("; next: ")[0]), 0, 0
        epoch = quorum.term if quorum.confirmed else 0
        return quorum_standing(quorum), epoch, quorum.metadata_index

    async def _partitions(self, image: MetadataImage) -> list[PartitionStanding]:
        """Those with a replica here, collected so that the loop's other work has its turn."""
        found: list[PartitionStanding] = []
        began_s = time.monotonic()
        for topic in list(image.topics()):
            for number, record in list(topic.partitions.items()):
                if self._node_id in record.replicas:
                    name = f"{topic.name}-{number}"
                    found.append(partition_standing(name, record, topic.record))
            if time.monotonic() - began_s >= SLICE_S:
                await asyncio.sleep(0)  # Not a wait: whoever else is due has its turn.
                began_s = time.monotonic()
        return found


def broker_standing(record: cluster_pb2.BrokerRecord) -> BrokerStanding:
    """A broker, as the metadata have it."""
    serves = not record.fenced and not record.in_controlled_shutdown
    return BrokerStanding(record.node_id, serves, record.drained_since_ms)


def partition_standing(
    name: str, record: cluster_pb2.PartitionRecord, topic: cluster_pb2.TopicRecord
) -> PartitionStanding:
    """A partition, as the metadata have it. Older controllers leave its min ISR out."""
    min_isr = record.min_insync_replicas or effective_min_isr(
        topic.configs, replication_factor(record)
    )
    return PartitionStanding(name, record.replicas, record.isr, min_isr, record.leader)


def quorum_standing(quorum: controller_pb2.DescribeQuorumResponse) -> QuorumStanding:
    """The controllers, as one of them tells."""
    doubt = ""
    if not quorum.confirmed:
        doubt = "no majority of the controllers confirms who leads them"
    return QuorumStanding(
        [
            VoterStanding(
                voter.node_id,
                behind=0
                if voter.node_id == quorum.leader_id
                else max(0, quorum.commit_index - voter.match_index)
                if voter.match_index >= 0
                else -1,
                answers=not voter.unreachable
                and voter.found_directory_id in (b"", voter.directory_id),
            )
            for voter in quorum.voters
        ],
        doubt,
    )
