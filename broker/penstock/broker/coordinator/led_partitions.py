"""The partitions of an internal topic that this broker leads, and so coordinates for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from penstock.broker.coordinator import refusals
from penstock.broker.coordinator.hosted import HostedShard, Place
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import MetadataImage
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    PenstockError,
)

_LOAD_TIMEOUT_S: Final = 5.0

H = TypeVar("H", bound=HostedShard[Any])


class LedPartitions(Mapping[int, H], Generic[H]):
    """Hosts each partition of ``topic`` for as long as this broker leads it, by number.

    Construct it before the replicas take their first metadata. ``ensure_topic`` has the topic made.
    Used on one event loop.
    """

    def __init__(
        self,
        topic: str,
        replicas: ReplicaLog,
        image: MetadataImage,
        *,
        ensure_topic: Callable[[], Awaitable[object]],
        make: Callable[[Place], H],
    ) -> None:
        self._topic = topic
        self._image = image
        self._ensure_topic = ensure_topic
        self._make = make
        self._hosted: dict[int, H] = {}
        replicas.add_leadership_listener(self._on_leadership)

    def __getitem__(self, partition: int) -> H:
        return self._hosted[partition]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._hosted))

    def __len__(self) -> int:
        return len(self._hosted)

    def hosted(self) -> list[H]:
        """What is hosted now. On any thread."""
        return list(self._hosted.values())

    def stop(self) -> None:
        """Coordinate no more: everybody who waits is told."""
        error = CoordinatorNotAvailableError("the coordinator's broker stops; look for another")
        for hosted in self._hosted.values():
            hosted.close(error)
        self._hosted.clear()

    async def route(self, key: str) -> H:
        """The partition that keeps ``key``; the topic is made when it is missing.

        Does not suspend when the topic exists, so messages of a stream keep their order. Raises
        NotCoordinatorError, with the address of who is, where this broker leads another one.
        """
        topic = self._image.topic(self._topic)
        if topic is None or not topic.partitions:
            await self._ensure_topic()
        return self.locate(key)

    def locate(self, key: str) -> H:
        """As :meth:`route`, where the topic was made before; else CoordinatorNotAvailableError."""
        topic = self._image.topic(self._topic)
        if topic is None or not topic.partitions:
            raise CoordinatorNotAvailableError(
                f"{self._topic} is being made, or nobody needed it yet; ask again soon"
            )
        partition = partition_for_group(key, len(topic.partitions))
        hosted = self._hosted.get(partition)
        if hosted is None:
            raise self._refusal(partition)
        return hosted

    async def all_loaded(self) -> list[H]:
        """Those led now, when all of them serve. Raises CoordinatorLoadInProgressError."""
        hosted = list(self._hosted.values())
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                for shard in hosted:
                    await shard.wait_loaded()
        except TimeoutError:
            raise CoordinatorLoadInProgressError(
                f"the coordinator is still reading partitions of {self._topic}; ask again soon"
            ) from None
        return hosted

    def leads(self, hosted: H) -> bool:
        """Whether this is still what is hosted."""
        return self._hosted.get(hosted.place.partition) is hosted

    def _on_leadership(self, topic: str, partition: int, leader_epoch: int, leading: bool) -> None:
        if topic != self._topic:
            return
        before = self._hosted.pop(partition, None)
        if before is not None:
            before.close(self._refusal(partition))
        found = self._image.topic(topic)
        if leading and found is not None:
            hosted = self._make(Place(topic, found.topic_id, partition, leader_epoch))
            self._hosted[partition] = hosted
            hosted.start()

    def _refusal(self, partition: int) -> PenstockError:
        return refusals.not_coordinator(self._image, self._topic, partition)
