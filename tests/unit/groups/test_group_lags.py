"""The lags of groups, as their coordinator's metrics show them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio
from prometheus_client import generate_latest

from penstock.broker.coordinator.lags import GroupLags
from penstock.broker.core.group_progress import Lag
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.metrics import BrokerMetrics
from penstock.v1 import cluster_pb2, common_pb2, log_pb2, log_pb2_grpc
from penstock.wire.ids import TopicPartition
from tests.unit.groups.coordinator_harness import topic_id_of

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


class Logs(log_pb2_grpc.LogServicer):
    """The ends of a broker's logs; it leads no others."""

    def __init__(self, ends: dict[TopicPartition, int]) -> None:
        self.ends = ends

    def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        response = log_pb2.ListOffsetsResponse()
        for entry in request.partitions:
            assert entry.timestamp_ms == -1
            result = response.partitions.add(partition=entry.partition, offset=-1)
            end = self.ends.get(TopicPartition(entry.partition.topic, entry.partition.partition))
            if end is None:
                result.error.CopyFrom(common_pb2.Error(code=6))
            else:
                result.offset = end
        return response

    async def ListOffsets(self, request: Any, context: Any) -> Any:
        return self.list_offsets(request)


def image_of(leaders: dict[TopicPartition, int], port: int) -> MetadataImage:
    image = MetadataImage()
    names = sorted({partition.topic for partition in leaders})
    image.apply(
        cluster_pb2.MetadataDelta(
            index=1,
            brokers=[
                cluster_pb2.BrokerRecord(node_id=1, host="127.0.0.1", port=1),
                cluster_pb2.BrokerRecord(node_id=2, host="127.0.0.1", port=port),
            ],
            topics=[
                cluster_pb2.TopicRecord(topic_id=topic_id_of(name), name=name) for name in names
            ],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id_of(partition.topic),
                    partition=partition.partition,
                    leader=leader,
                )
                for partition, leader in leaders.items()
            ],
        )
    )
    return image


@asynccontextmanager
async def other_broker(logs: Logs) -> AsyncIterator[int]:
    server = aio.server()
    log_pb2_grpc.add_LogServicer_to_server(logs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def lags_of(
    port: int, leaders: dict[TopicPartition, int], committed: Any, clock: Any = lambda: 0.0
) -> GroupLags:
    return GroupLags(
        1,
        image_of(leaders, port),
        Logs({A0: 10}),
        lambda: committed,
        open_channel=lambda address, _node_id: aio.insecure_channel(address),
        show=lambda _lags: None,
        clock=clock,
    )


async def test_lags_are_summed_over_leaders_by_group_and_topic() -> None:
    committed = {"g": {A0: 4, A1: 15, B0: 9}, "h": {A0: 10}, "new": {}}
    async with other_broker(Logs({A1: 20, B0: 8})) as port:
        lags = await lags_of(port, {A0: 1, A1: 2, B0: 2}, committed).look()
    # A position beyond the end, of a log that was cut, is no negative lag.
    assert lags == {("g", "a"): Lag(11, 0), ("g", "b"): Lag(0, 0), ("h", "a"): Lag(0, 0)}


async def test_a_topic_of_which_a_part_is_unknown_is_left_out() -> None:
    committed = {"g": {A0: 4, A1: 15}, "h": {A0: 4}, "i": {B0: 1}}
    async with other_broker(Logs({})) as port:
        refused = await lags_of(port, {A0: 1, A1: 2, B0: -1}, committed).look()
    dead = await lags_of(port, {A0: 1, A1: 2, B0: -1}, committed).look()
    assert refused == dead == {("h", "a"): Lag(6, 0)}


async def test_how_long_a_group_has_stood_still_is_told_from_look_to_look() -> None:
    committed = {"g": {A0: 4}}
    now_s = [100.0]
    lags = lags_of(1, {A0: 1}, committed, lambda: now_s[0])
    await lags.look()
    now_s[0] = 160.0
    assert await lags.look() == {("g", "a"): Lag(6, 60)}
    committed["g"][A0] = 5
    assert await lags.look() == {("g", "a"): Lag(5, 0)}


def test_groups_that_went_elsewhere_are_shown_no_more() -> None:
    metrics = BrokerMetrics()

    def shown() -> list[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return sorted(line for line in lines if 'group="g"' in line)

    metrics.coordinators.group_lags({("g", "a"): Lag(11, 30), ("g", "b"): Lag(0, 0)})
    assert shown() == [
        'penstock_group_lag_records{group="g",topic="a"} 11.0',
        'penstock_group_lag_records{group="g",topic="b"} 0.0',
        'penstock_group_stalled_seconds{group="g",topic="a"} 30.0',
        'penstock_group_stalled_seconds{group="g",topic="b"} 0.0',
    ]
    metrics.coordinators.group_lags({("g", "a"): Lag(3, 0)})
    assert shown() == [
        'penstock_group_lag_records{group="g",topic="a"} 3.0',
        'penstock_group_stalled_seconds{group="g",topic="a"} 0.0',
    ]
