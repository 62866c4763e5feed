"""The typed refusals of replication, with what a client needs to go on."""

from __future__ import annotations

from itertools import islice
from typing import Final

from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import cluster_pb2
from penstock.wire.config_keys import suggest
from penstock.wire.errors import (
    FencedLeaderEpochError,
    LeaderHint,
    LeaderNotAvailableError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    StorageError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicIdPartition, TopicPartition, format_topic_id

_MAX_NEAR_NAMES: Final = 1000


class Refusals:
    """Makes errors that name the partition, the epochs, and where to go instead."""

    def __init__(self, node_id: int, image: MetadataImage) -> None:
        self._node_id = node_id
        self._image = image

    def hint(self, record: cluster_pb2.PartitionRecord) -> LeaderHint | None:
        """Where the partition is led, or None when that is nowhere, here or unknown."""
        broker = self._image.brokers.get(record.leader)
        if broker is None or record.leader == self._node_id:
            return None
        return LeaderHint(record.leader, record.leader_epoch, broker.host, broker.port)

    def locate(
        self, topic: str, topic_id: bytes, partition: int
    ) -> tuple[TopicIdPartition, cluster_pb2.PartitionRecord]:
        """The partition as the metadata has it.

        Raises UnknownTopicOrPartitionError (naming near topics) or UnknownTopicIdError.
        """
        found = self._image.topic(topic)
        if found is None:
            # Comparing names takes time: a bounded number of them.
            names = [known.name for known in islice(self._image.topics(), _MAX_NEAR_NAMES)]
            near = suggest(topic, names)
            raise UnknownTopicOrPartitionError(
                f"no topic {topic!r} is known to broker {self._node_id}{near}; create it with "
                f"`penstock topics create {topic}`, or list what there is"
            )
        if topic_id and topic_id != found.topic_id:
            raise UnknownTopicIdError(
                f"topic {topic!r} has id {format_topic_id(found.topic_id)} here, not "
                f"{format_topic_id(topic_id)}: it was deleted and made anew; refresh the metadata"
            )
        record = found.partitions.get(partition)
        if record is None:
            raise UnknownTopicOrPartitionError(
                f"topic {topic!r} has no partition {partition}; it has {len(found.partitions)}, "
                f"from 0 to {len(found.partitions) - 1}; next: name one of these"
            )
        return TopicIdPartition(found.topic_id, partition), record

    def not_leader(self, key: TopicIdPartition) -> PenstockError:
        """What to answer for a partition that is not led here."""
        record = self._image.partition_by_id(key)
        name = self._image.named(key)
        if record is None or name is None:
            return UnknownTopicOrPartitionError(f"partition {key} does not exist (any more)")
        if record.leader < 0:
            offline = sorted(set(record.isr).intersection(record.offline_replicas))
            if offline:
                return LeaderNotAvailableError(
                    f"{name} has no leader now: its in-sync replica on broker {offline[0]} is "
                    "offline; look for data_directory_failed and `replica is offline` in that "
                    "broker's log, mend that and restart it, or retry later"
                )
            return LeaderNotAvailableError(
                f"{name} has no leader now: none of its in-sync replicas {sorted(record.isr)} is "
                "up; start one of them, or retry later"
            )
        if record.leader == self._node_id:
            return NotLeaderError(
                f"broker {self._node_id} is not ready to lead {name} in epoch "
                f"{record.leader_epoch}; retry"
            )
        return NotLeaderError(
            f"broker {self._node_id} does not lead {name}; broker {record.leader} does, in epoch "
            f"{record.leader_epoch}",
            leader=self.hint(record),
        )

    def offline(self, key: TopicIdPartition, reason: PenstockError) -> PenstockError:
        """What to answer for a partition whose replica here can't be served."""
        record = self._image.partition_by_id(key)
        if record is None or self.hint(record) is not None:
            return self.not_leader(key)
        return StorageError(f"broker {self._node_id}: {reason.message}")

    def check_leader_epoch(
        self, name: TopicPartition, *, asked: int, current: int, key: TopicIdPartition
    ) -> None:
        """Refuse a request made under another leader epoch (KIP-320); -1 asks for no check.

        Raises FencedLeaderEpochError for an older one, UnknownLeaderEpochError for a newer one.
        """
        if asked < 0 or asked == current:
            return
        if asked < current:
            record = self._image.partition_by_id(key)
            raise FencedLeaderEpochError(
                f"{name} is led in epoch {current}, the request was made for {asked}; refresh the "
                "metadata",
                leader=None if record is None else self.hint(record),
            )
        raise UnknownLeaderEpochError(
            f"broker {self._node_id} knows {name} in epoch {current}, the request was made for "
            f"{asked}; retry"
        )


def not_enough_replicas(
    name: TopicPartition, isr: frozenset[int], min_isr: int, replicas: tuple[int, ...]
) -> NotEnoughReplicasError:
    """Refuse acks=all before anything is appended, naming who is in sync and who is not."""
    return NotEnoughReplicasError(_too_few(name, isr, min_isr, replicas))


def not_enough_replicas_after_append(
    name: TopicPartition, isr: frozenset[int], min_isr: int, replicas: tuple[int, ...]
) -> NotEnoughReplicasAfterAppendError:
    """The in-sync set shrank while acks=all was waited for."""
    return NotEnoughReplicasAfterAppendError(
        f"{_too_few(name, isr, min_isr, replicas)}. The batch is in the leader's log and may yet "
        "be committed: a retry without idempotence may write it twice"
    )


def _too_few(
    name: TopicPartition, isr: frozenset[int], min_isr: int, replicas: tuple[int, ...]
) -> str:
    missing = [node_id for node_id in replicas if node_id not in isr]
    return (
        f"{name}: {len(isr)} in-sync replica{'' if len(isr) == 1 else 's'} (brokers "
        f"{_listed(sorted(isr))}), min.insync.replicas needs {min_isr}; out of sync: brokers "
        f"{_listed(missing)}. Start them or wait until they have caught up"
    )


def _listed(node_ids: list[int]) -> str:
    return ", ".join(str(node_id) for node_id in node_ids) or "none"
