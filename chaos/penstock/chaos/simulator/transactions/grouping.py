"""What a broker in the simulator does for consumer groups: it coordinates them where it leads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.core.image_topics import ImageTopics
from penstock.broker.core.metadata_image import ImageChange
from penstock.broker.core.transactions import Marker
from penstock.chaos.simulator.network import End
from penstock.chaos.simulator.serving import Answer
from penstock.chaos.simulator.transactions.group_hosting import HostedGroups
from penstock.chaos.simulator.transactions.leading import Leading
from penstock.chaos.simulator.transactions.positions import OFFSETS_TOPIC_ID, keeper_of
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.partition import SimulatedPartition

METHODS: Final = ("commit transaction offsets", "fetch offsets")
STEPS: Final = (
    "positions come",
    "positions appended",
    "positions committed",
    "positions answered",
    "positions ended",
)
"""What positions in a transaction go through, and a broker may end after."""


class Groups:
    """One broker's: the partitions of ``__consumer_offsets`` that it leads."""

    def __init__(self, broker: SimulatedBroker, leading: Leading) -> None:
        self._broker = broker
        self._leading = leading
        self._topics = ImageTopics(broker.image)
        self._hosted: dict[TopicIdPartition, HostedGroups] = {}
        self._streams = 0

    def role_changed(self, partition: SimulatedPartition) -> None:
        """A replica leads or follows, or does so in another epoch."""
        self.closed(partition)
        if partition.key.topic_id == OFFSETS_TOPIC_ID and partition.is_leader:
            self._hosted[partition.key] = HostedGroups(
                self._broker, partition, self._topics, self._leading
            )

    def closed(self, partition: SimulatedPartition) -> None:
        """A replica is hosted here no longer."""
        hosted = self._hosted.pop(partition.key, None)
        if hosted is not None:
            hosted.close()

    def metadata_changed(self, change: ImageChange) -> None:
        """The broker has heard of a change."""
        news = self._topics.news(change)
        if news is not None:
            for hosted in list(self._hosted.values()):
                hosted.topics_changed(news)

    def marked(self, partition: SimulatedPartition, marker: Marker) -> None:
        """A mark was appended, or was there, in a partition that is led here."""
        hosted = self._hosted.get(partition.key)
        if hosted is not None:
            hosted.marked([marker], partition.log.log_end_offset)

    def accept(self, end: End) -> None:
        """A member opens its stream."""
        self._streams += 1
        end.on_message = partial(self._heartbeat, self._streams, end)

    def _heartbeat(
        self, stream_id: int, end: End, request: groups_pb2.GroupHeartbeatRequest
    ) -> None:
        if not self._broker.alive:
            return
        hosted = self._hosted.get(keeper_of(request.group_id))
        if hosted is None or not self._broker.may_serve():
            code = ErrorCode.NOT_COORDINATOR.value
            error = common_pb2.Error(code=code, message="simulated")
            end.send(groups_pb2.GroupHeartbeatResponse(error=error, member_id=request.member_id))
        else:
            hosted.heartbeat(stream_id, end, request)

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a member, or an onlooker."""
        commits = method == "commit transaction offsets"
        key = keeper_of(request.commit.group_id if commits else request.group_id)
        hosted = self._hosted.get(key)
        if hosted is not None:
            hosted.serve(method, request, reply)
            return
        record = self._broker.image.partition_by_id(key)
        if record is None:
            reply(Answer(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        else:
            code = ErrorCode.NOT_COORDINATOR
            reply(Answer(code, leader=record.leader, leader_epoch=record.leader_epoch))
