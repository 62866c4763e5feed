"""Why replicas are out of sync: asked of those who know, the leaders and those who are damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from penstock.client.cluster import Cluster, gather_all
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import PenstockError

ASKED_MS: Final = 1_000.0
"""So long each of them has to answer; all are asked at once."""

_Entry = metadata_pb2.PartitionDescription
_Place = tuple[bytes, int]
"""A topic's id and a partition's number."""


async def ask_why(cluster: Cluster, picture: metadata_pb2.DescribeTopicsResponse) -> None:
    """Complete ``picture``, what one broker says of some topics, with why replicas are out of sync.

    Every replica that is not in sync is in ``out_of_sync`` of its partition then, and with
    OUT_OF_SYNC_REASON_UNSPECIFIED where nobody can be asked, or does not know. What a leader says
    of its partitions takes the place of what is older. Raises nothing for brokers that do not
    answer; takes ASKED_MS at most, and no time at all where all are in sync.
    """
    live = {broker.node_id for broker in picture.brokers if not broker.fenced}
    wanted = _whom_to_ask(picture, live)
    if wanted:
        cluster.metadata.replace_brokers(picture.brokers)

    async def ask(
        node_id: int, topics: Iterable[str]
    ) -> tuple[int, metadata_pb2.DescribeTopicsResponse | None]:
        request = metadata_pb2.DescribeTopicsRequest(topics=sorted(topics), out_of_sync=True)
        try:
            return node_id, await cluster.call(
                node_id,
                lambda channel: metadata_pb2_grpc.MetadataStub(channel).DescribeTopics,
                request,
                timeout_ms=ASKED_MS,
                what="Metadata.DescribeTopics",
            )
        except PenstockError:
            return node_id, None

    answers = dict(await gather_all([ask(*question) for question in wanted.items()]))
    said = {
        node_id: dict(_partitions(answer))
        for node_id, answer in answers.items()
        if answer is not None
    }
    for place, entry in _partitions(picture):
        _complete(place, entry, said, live)


def _partitions(
    picture: metadata_pb2.DescribeTopicsResponse,
) -> Iterator[tuple[_Place, _Entry]]:
    for topic in picture.topics:
        for entry in topic.partitions:
            yield (topic.topic_id, entry.partition), entry


def _whom_to_ask(
    picture: metadata_pb2.DescribeTopicsResponse, live: set[int]
) -> dict[int, set[str]]:
    """The topics to ask about, by broker: leaders, and those whose own replica can't be served."""
    wanted: dict[int, set[str]] = {}
    for topic in picture.topics:
        for entry in topic.partitions:
            missing = set(entry.replicas).difference(entry.isr)
            asked = missing & set(entry.offline_replicas)
            if not missing <= {one.node_id for one in entry.out_of_sync}:
                asked |= {entry.leader} if missing else set()
            for node_id in asked & live:
                wanted.setdefault(node_id, set()).add(topic.name)
    return wanted


def _complete(
    place: _Place, entry: _Entry, said: Mapping[int, Mapping[_Place, _Entry]], live: set[int]
) -> None:
    if set(entry.replicas) <= set(entry.isr):
        return
    reasons: dict[int, metadata_pb2.OutOfSyncReason.ValueType] = {
        node_id: metadata_pb2.OUT_OF_SYNC_REASON_OFFLINE
        for node_id in entry.replicas
        if node_id not in live
    }
    reasons.update((one.node_id, one.reason) for one in entry.out_of_sync)
    by_leader = said.get(entry.leader, {}).get(place)
    if by_leader is not None and by_leader.leader == entry.leader:
        reasons.update((one.node_id, one.reason) for one in by_leader.out_of_sync)
        if by_leader.partition_epoch >= entry.partition_epoch:
            entry.CopyFrom(by_leader)
    # The leader knows such a one as offline; it itself knows more.
    for node_id in entry.offline_replicas:
        own = said.get(node_id, {}).get(place)
        if own is not None:
            words = [one for one in own.out_of_sync if one.node_id == node_id]
            reasons.update((one.node_id, one.reason) for one in words)
    entry.ClearField("out_of_sync")
    for node_id in entry.replicas:
        if node_id not in entry.isr:
            unknown = metadata_pb2.OUT_OF_SYNC_REASON_UNSPECIFIED
            entry.out_of_sync.add(node_id=node_id, reason=reasons.get(node_id, unknown))
