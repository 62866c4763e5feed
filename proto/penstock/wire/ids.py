"""The identities that requests carry. Pure values, ordered and hashable."""

from __future__ import annotations

import uuid
from typing import Final, NamedTuple, NewType

NodeId = NewType("NodeId", int)
"""A node's number, unique in its cluster; -1 (NO_NODE) stands for nobody."""

BrokerEpoch = NewType("BrokerEpoch", int)
"""One registration of a broker process: the metadata index of the command that made it."""

LeaderEpoch = NewType("LeaderEpoch", int)
"""One leadership of a partition; -1 stands for unknown."""

TopicId = NewType("TopicId", bytes)
"""A topic's 16-byte id: a topic deleted and made anew under its name has another one."""

NO_NODE: Final = NodeId(-1)
NO_EPOCH: Final = LeaderEpoch(-1)
NO_OFFSET: Final = -1
NO_PRODUCER_ID: Final = -1


class TopicPartition(NamedTuple):
    """A partition as people name it."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicIdPartition(NamedTuple):
    """A partition as nodes name it: the id tells a topic from an earlier one of its name."""

    topic_id: TopicId
    partition: int

    def __str__(self) -> str:
        return f"{format_topic_id(self.topic_id)}-{self.partition}"


def format_topic_id(topic_id: bytes) -> str:
    """The id as people read it: a UUID, or ``?`` when it is not 16 bytes long."""
    return str(uuid.UUID(bytes=topic_id)) if len(topic_id) == 16 else "?"
