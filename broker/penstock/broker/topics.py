"""The cluster's own topics, and how a broker has them made."""

from __future__ import annotations

import asyncio
import uuid
from typing import Final, Protocol

from penstock.broker.core.metadata_image import MetadataImage, Topic
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    ErrorCode,
    error_from_proto,
)
from penstock.wire.wording import counted

OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"

_TIMEOUT_MS: Final = 5_000

_CONFIGS: Final = {
    "cleanup.policy": "compact",
    # Smaller than a topic of users': a coordinator reads all of it when it takes over.
    "segment.bytes": str(100 * 1024 * 1024),
    # One record holds a member's whole assignment: 8 MB are some 800,000 partitions; or all
    # partitions of a transaction, or all winners of an engine's commit.
    "max.message.bytes": str(8 * 1024 * 1024),
}


class Controllers(Protocol):
    """What is asked of the active controller."""

    async def execute_admin(
        self, command: cluster_pb2.Command, timeout_ms: int
    ) -> cluster_pb2.CommandResult:
        """Carry out a command."""
        ...

    async def wait_for_index(self, index: int, timeout_ms: int) -> None:
        """Wait until the local image has reached an index."""
        ...


class InternalTopic:
    """Makes a topic of the cluster's own on first need; callers at the same time share one attempt.

    ``replication_setting`` is the key of the setting that ``replication_factor`` comes from.
    """

    def __init__(
        self,
        name: str,
        image: MetadataImage,
        controllers: Controllers,
        *,
        partition_count: int,
        replication_factor: int,
        replication_setting: str,
    ) -> None:
        self.name: Final = name
        self._image = image
        self._controllers = controllers
        self._partition_count = partition_count
        self._replication_factor = replication_factor
        self._replication_setting = replication_setting
        self._lock = asyncio.Lock()

    async def ensure(self) -> Topic:
        """The topic, made if it was missing.

        Raises CoordinatorNotAvailableError while there are too few brokers: what is kept on fewer
        replicas than configured would be lost with them.
        """
        async with self._lock:
            topic = self._image.topic(self.name)
            if topic is not None:
                return topic
            self._check_brokers()
            await self._create()
            topic = self._image.topic(self.name)
            if topic is None:
                raise CoordinatorNotAvailableError(
                    f"{self.name} was made, but this broker has not heard of it yet; try again"
                )
            return topic

    def _check_brokers(self) -> None:
        alive = [broker for broker in self._image.brokers.values() if not broker.fenced]
        if len(alive) < self._replication_factor:
            raise CoordinatorNotAvailableError(
                f"{self.name} needs {counted(self._replication_factor, 'broker')} to be made, "
                f"and {len(alive)} {'is' if len(alive) == 1 else 'are'} alive; start more, or set "
                f"{self._replication_setting} lower"
            )

    async def _create(self) -> None:
        command = cluster_pb2.Command(
            create_topic=cluster_pb2.CreateTopicCommand(
                name=self.name,
                topic_id=uuid.uuid4().bytes,
                partition_count=self._partition_count,
                replication_factor=self._replication_factor,
                configs=_CONFIGS,
                internal=True,
            )
        )
        result = await self._controllers.execute_admin(command, _TIMEOUT_MS)
        if result.HasField("error") and result.error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
            raise CoordinatorNotAvailableError(
                f"{self.name} could not be made: {error_from_proto(result.error).message}"
            )
        await self._controllers.wait_for_index(result.index, _TIMEOUT_MS)


class InternalTopics:
    """The topics that coordinators keep their state in, by name."""

    def __init__(self, *topics: InternalTopic) -> None:
        self._topics = {topic.name: topic for topic in topics}

    async def ensure(self, name: str) -> Topic:
        """One of them, made if it was missing; see InternalTopic.ensure."""
        return await self._topics[name].ensure()
