"""Asks every broker, as time goes by, how far its partitions are: high watermark and log start.

By the protocol and not by the client, which would ask whoever leads: here each broker is asked
about what it believes to lead itself, with the epoch in which it believes so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import grpc

from penstock.chaos.evidence import Watcher
from penstock.v1 import log_pb2, log_pb2_grpc, metadata_pb2, metadata_pb2_grpc
from penstock.v1.common_pb2 import TopicPartition
from penstock.wire.ids import format_topic_id
from penstock.wire.transport import CHANNEL_OPTIONS

_EVERY_S: Final = 0.5
_CALL_S: Final = 1.0
_END: Final = -1
_START: Final = -2


class WatermarkWatcher(Watcher):
    """``seen`` has an entry for each partition that a broker said it leads, each time."""

    def __init__(self, bootstrap: str, epoch_ns: int) -> None:
        super().__init__("watermarks", _EVERY_S)
        self._epoch_ns: Final = epoch_ns
        self._channels: Final[dict[str, grpc.Channel]] = {}
        self._addresses = [one.strip() for one in bootstrap.split(",")]
        self.seen: Final[list[Mapping[str, Any]]] = []

    def stop(self, timeout_s: float = 10.0) -> None:
        """Look no more, and free the connections. Idempotent."""
        super().stop(timeout_s)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def look(self) -> None:
        """Ask all of them at once."""
        request = metadata_pb2.DescribeTopicsRequest(all_topics=True)
        calls = [
            (
                address,
                metadata_pb2_grpc.MetadataStub(channel).DescribeTopics.future(
                    request, timeout=_CALL_S
                ),
            )
            for address in self._addresses
            for channel in (self._channel(address),)
        ]
        asked = [
            self._ask(address, answer)
            for address, call in calls
            if (answer := _answer(call)) is not None
        ]
        for led, asked_t, call in filter(None, asked):
            offsets = _answer(call)
            if offsets is not None:
                self._note(led, asked_t, offsets)

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def _ask(self, address: str, topics: metadata_pb2.DescribeTopicsResponse) -> Any:
        """What the broker leads by its own account, when it was asked how far, and the call."""
        host, _, port = address.rpartition(":")
        node = next(
            (
                broker.node_id
                for broker in topics.brokers
                if (broker.host, str(broker.port)) == (host, port)
            ),
            None,
        )
        led = [
            (node, topic, one.partition, one.leader_epoch)
            for topic in topics.topics
            if not topic.internal
            for one in topic.partitions
            if one.leader == node
        ]
        if node is None or not led:
            return None
        request = log_pb2.ListOffsetsRequest(
            partitions=[
                log_pb2.ListOffsetsPartition(
                    partition=TopicPartition(
                        topic=topic.name, partition=partition, topic_id=topic.topic_id
                    ),
                    timestamp_ms=which,
                    current_leader_epoch=epoch,
                )
                for which in (_END, _START)
                for _, topic, partition, epoch in led
            ]
        )
        stub = log_pb2_grpc.LogStub(self._channel(address))
        return led, self._now_ns(), stub.ListOffsets.future(request, timeout=_CALL_S)

    def _note(self, led: Any, asked_t: int, offsets: log_pb2.ListOffsetsResponse) -> None:
        t = self._now_ns()
        ends = offsets.partitions[: len(led)]
        starts = offsets.partitions[len(led) :]
        for (node, topic, partition, epoch), end, start in zip(led, ends, starts, strict=False):
            if end.HasField("error") or start.HasField("error"):
                continue
            self.seen.append(
                {
                    "t": t,
                    "asked_t": asked_t,
                    "node": node,
                    "topic": topic.name,
                    "topic_id": format_topic_id(topic.topic_id),
                    "partition": partition,
                    "leader_epoch": epoch,
                    "high_watermark": end.offset,
                    "log_start_offset": start.offset,
                    "is_leader": True,
                }
            )

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._epoch_ns


def _answer(call: Any) -> Any:
    try:
        return call.result()
    except (grpc.RpcError, grpc.FutureCancelledError, grpc.FutureTimeoutError):
        return None
