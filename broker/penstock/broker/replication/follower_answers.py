"""What a follower is to be told of the positions it stated, until a message takes it along."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from penstock.broker.core.ports import EpochEnd
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.ports import Push
from penstock.v1 import replication_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicIdPartition

MAX_ANSWERS: Final = 2000
"""So many answers go into one message."""

RESTARTS_AT_MOST: Final = 8
"""So many of them have the producers of a log looked through, even where little is found."""


class _Answer:
    """One partition's. Of who begins anew: the leadership under which it was told to."""

    __slots__ = ("_leader_epoch", "_partition", "push")

    def __init__(
        self, push: replication_pb2.ReplicaPush, restarts: Partition | None = None
    ) -> None:
        self.push = push
        self._partition = restarts
        self._leader_epoch = -1 if restarts is None else restarts.replica.leader_epoch

    @property
    def restarts(self) -> bool:
        """Whether the producers' state goes with it."""
        return self._partition is not None

    def complete(self, refusal: Callable[[TopicIdPartition], PenstockError]) -> int:
        """Hand the producers' state over, once; refuse if the partition is led so no more.

        The size of what is handed over in bytes.
        """
        partition, push = self._partition, self.push
        if partition is None:
            return 0
        if not partition.is_leader or partition.replica.leader_epoch != self._leader_epoch:
            self._partition = None
            push.ClearField("diverging_epoch")
            push.ClearField("producers")
            push.error.CopyFrom(refusal(partition.key).to_proto())
        elif not push.producers:
            push.producers = partition.log.producers_below(push.diverging_epoch.end_offset)
        return len(push.producers)


class FollowerAnswers:
    """The answers to one follower that wait for a message: one a partition, to what it stated last.

    What a replica that begins anew is handed over is up to 0.8 MB and takes milliseconds to make,
    and a broker whose disk was replaced asks for it of all of its partitions at once. So it is made
    when it is sent: what waits is small, but for one that did not fit into the message before.
    ``refusal`` says why a partition is not led here. Used on one event loop.
    """

    def __init__(self, refusal: Callable[[TopicIdPartition], PenstockError]) -> None:
        self._refusal = refusal
        self._waiting: OrderedDict[TopicIdPartition, _Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse(self, key: TopicIdPartition, stated_epoch: int, error: PenstockError) -> None:
        """The partition is not served. ``stated_epoch``: the one that the follower stated; it
        ignores what is said in any other.
        """
        push = _push(key, stated_epoch)
        push.error.CopyFrom(error.to_proto())
        self._add(key, _Answer(push))

    def diverge(self, partition: Partition, stated_epoch: int, end: EpochEnd) -> None:
        """The follower is to cut there; in epoch -1, to begin anew."""
        push = _push(partition.key, stated_epoch)
        push.diverging_epoch.leader_epoch = end.leader_epoch
        push.diverging_epoch.end_offset = end.end_offset
        # Who begins anew will not see what is deleted.
        self._add(partition.key, _Answer(push, partition if end.leader_epoch < 0 else None))

    def withdraw(self, key: TopicIdPartition) -> None:
        """The follower has stated something else, or follows the partition no more."""
        self._waiting.pop(key, None)

    def take(self, laden: Push, max_bytes: int) -> None:
        """Move the oldest into an empty message: of what is handed over ``max_bytes`` at most, but
        for a single one that is larger.
        """
        least = max_bytes // RESTARTS_AT_MOST
        left = max_bytes
        message = laden.message
        while self._waiting and len(message.pushes) < MAX_ANSWERS:
            key, answer = next(iter(self._waiting.items()))
            if answer.restarts:
                if left < max_bytes and left < least:
                    break
                size_bytes = max(answer.complete(self._refusal), least)
                if size_bytes > left and left < max_bytes:
                    break  # It goes first the next time.
                left -= size_bytes
            message.pushes.append(answer.push)
            laden.records.append(b"")
            del self._waiting[key]

    def _add(self, key: TopicIdPartition, answer: _Answer) -> None:
        self._waiting.pop(key, None)
        self._waiting[key] = answer


def _push(key: TopicIdPartition, leader_epoch: int) -> replication_pb2.ReplicaPush:
    push = replication_pb2.ReplicaPush(leader_epoch=leader_epoch)
    push.partition.topic_id = key.topic_id
    push.partition.partition = key.partition
    return push
