"""A broker without logs, as a process: what it is to the controllers, and nothing else.

Registration, heartbeats, metadata feed and picture are the broker's own code (ControllerLink and
MetadataImage); nothing is replicated. For benchmarks, which ask it over pipes (bench/children.py).
"""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import Callable
from typing import Any

import uvloop
from children import Answer, serve, settings
from grpc import aio

from penstock.broker.controller_link import ControllerLink
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.identity import BrokerIdentity
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.errors import NotControllerError, RequestTimedOutError
from penstock.wire.transport import CHANNEL_OPTIONS, quiet_grpc, tune_malloc

_ASK_AGAIN_MS = 5_000


class Broker:
    """What the parent asks of a broker. Times are those of the machine's monotonic clock."""

    def __init__(self, given: Answer) -> None:
        self._node_id: int = given["node_id"]
        self._cluster_id: str = given["cluster_id"]
        self._image = MetadataImage()
        self._changed = asyncio.Event()
        self._changed_at_s = 0.0
        self._load: asyncio.Task[None] | None = None
        self._acknowledged: list[tuple[float, float, str]] = []  # Sent, answered, topic.
        identity = BrokerIdentity(
            self._cluster_id, self._node_id, "127.0.0.1", 9_000 + self._node_id, "", -1
        )
        self._link = ControllerLink(
            identity,
            {int(node): tuple(at) for node, at in given["voters"].items()},
            self._image,
            connector=NodeConnector(None),
            heartbeat_interval_ms=1000,
            session_timeout_ms=6000,
            on_change=self._on_change,
            on_registered=lambda _epoch: None,
        )

    async def start(self) -> None:
        """Register and follow the metadata."""
        await self._link.start()

    async def _on_change(self, _change: ImageChange) -> None:
        self._changed_at_s = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> Answer:
        """When the picture came to be so: the arrival of the change after which it is."""
        while True:
            at_s, changed = self._changed_at_s, self._changed
            if holds():
                return {"at": at_s, "index": self._image.index}
            await changed.wait()

    async def unfenced(self, *, nodes: list[int]) -> Answer:
        """Wait until the brokers are known and unfenced."""

        def holds() -> bool:
            brokers = self._image.brokers
            return all(node in brokers and not brokers[node].fenced for node in nodes)

        return await self._until(holds)

    async def knows(self, *, partitions: int) -> Answer:
        """Wait until so many partitions are known."""
        return await self._until(
            lambda: sum(len(topic.partitions) for topic in self._image.topics()) >= partitions
        )

    async def led_without(self, *, node: int) -> Answer:
        """Wait until every partition is led, and none by that broker."""

        def holds() -> bool:
            return self._image.brokers[node].fenced and all(
                partition.leader not in (node, -1)
                for topic in self._image.topics()
                for partition in topic.partitions.values()
            )

        return await self._until(holds)

    async def led_by(self, *, node: int) -> Answer:
        """How many partitions the broker leads."""
        led = sum(
            partition.leader == node
            for topic in self._image.topics()
            for partition in topic.partitions.values()
        )
        return {"count": led}

    async def active(self) -> Answer:
        """The active controller, as this broker sees it."""
        return {"node": self._image.controller_id, "index": self._image.index}

    async def create(self, *, topics: int, partitions: int, replicas: int, name: str) -> Answer:
        """Create topics, a few at a time; when it began and when all were committed."""
        names = iter([f"{name}-{number}" for number in range(topics)])

        async def work() -> None:
            for topic in names:
                await self._create(topic, partitions, replicas)

        began_s = time.monotonic()
        await asyncio.gather(*(work() for _ in range(4)))
        return {"began": began_s, "at": time.monotonic()}

    async def _create(self, topic: str, partitions: int, replicas: int) -> None:
        # The id makes the question one that takes effect once, however often it is put.
        command = cluster_pb2.CreateTopicCommand(
            name=topic,
            topic_id=uuid.uuid4().bytes,
            partition_count=partitions,
            replication_factor=replicas,
        )
        while True:
            try:
                result = await self._link.execute_admin(
                    cluster_pb2.Command(create_topic=command), _ASK_AGAIN_MS
                )
            except (NotControllerError, RequestTimedOutError):
                continue
            if not result.HasField("error"):
                return
            if not result.error.retriable:
                raise RuntimeError(f"{topic}: {result.error.message}")

    async def begin_load(self, *, name: str, clients: int, replicas: int) -> Answer:
        """Create topics all the time."""
        self._acknowledged.clear()
        self._load = asyncio.create_task(self._run_load(name, clients, replicas))
        return {}

    async def _run_load(self, name: str, clients: int, replicas: int) -> None:
        async def work(client: int) -> None:
            number = 0
            while True:
                topic, sent_s = f"{name}-{client}-{number}", time.monotonic()
                await self._create(topic, 1, replicas)
                self._acknowledged.append((sent_s, time.monotonic(), topic))
                number += 1

        await asyncio.gather(*(work(client) for client in range(clients)))

    async def answered_after(self, *, at: float) -> Answer:
        """Wait for a topic that was asked for after the time; when it was committed."""
        while True:
            later = [answered for sent, answered, _ in self._acknowledged if sent > at]
            if later:
                return {"at": min(later)}
            if self._load is not None and self._load.done():
                self._load.result()
            await asyncio.sleep(0.002)

    async def end_load(self) -> Answer:
        """Stop creating; the topics whose creation was acknowledged."""
        assert self._load is not None
        self._load.cancel()
        await asyncio.gather(self._load, return_exceptions=True)
        return {"topics": [topic for _, _, topic in self._acknowledged]}

    async def snapshot(self, *, address: str) -> Answer:
        """What a broker that comes anew waits for: seconds until all is received, and is known."""
        began_s = time.monotonic()
        async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            request = controller_pb2.WatchMetadataRequest(
                cluster_id=self._cluster_id, node_id=self._node_id
            )
            image, received_s, size = MetadataImage(), 0.0, 0
            call: Any = ControllerStub(channel).WatchMetadata(request)
            async for message in call:
                received_s, size = time.monotonic() - began_s, message.ByteSize()
                image.apply(message.delta)
                break
            call.cancel()
        names = [topic.name for topic in image.topics()]
        return {
            "received": received_s,
            "known": time.monotonic() - began_s,
            "bytes": size,
            "index": image.index,
            "partitions": sum(len(topic.partitions) for topic in image.topics()),
            "topics": names if len(names) < 50_000 else [],
        }


async def main(given: Answer) -> None:
    """Run one broker until the parent is gone."""
    broker = Broker(given)
    await broker.start()
    gc.collect()
    gc.freeze()
    requests = [
        "unfenced", "knows", "led_without", "led_by", "active", "create", "begin_load",
        "answered_after", "end_load", "snapshot",
    ]  # fmt: skip
    await serve({name: getattr(broker, name) for name in requests})


if __name__ == "__main__":
    tune_malloc()
    quiet_grpc()
    uvloop.run(main(settings()))
