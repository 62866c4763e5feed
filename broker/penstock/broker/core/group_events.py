"""What happens to consumer groups, and what they want done: the words of the group cores."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from penstock.broker.core.group_state import Change
from penstock.broker.core.group_values import Producer
from penstock.v1 import groups_pb2
from penstock.wire.ids import TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Limits and intervals of all groups of a broker, in milliseconds unless named otherwise."""

    heartbeat_interval_ms: int = 3_000
    min_session_timeout_ms: int = 1_000
    max_session_timeout_ms: int = 1_800_000
    # For members that ask for none; Kafka's defaults.
    default_session_timeout_ms: int = 45_000
    default_rebalance_timeout_ms: int = 300_000
    # Changes of a group this soon after its last assignment wait, so that a thousand members that
    # join together are assigned a few times, not a thousand times.
    assignment_interval_ms: int = 50
    # After records could not be written, what depended on them is tried again after this.
    retry_ms: int = 500
    # Offsets of what nobody reads any more are kept so long, and it is looked for so often.
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000
    offsets_retention_check_interval_ms: int = 600_000
    max_offset_metadata_bytes: int = 4_096
    max_topics_of_member: int = 10_000


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member's message on a stream. Streams are numbered in the order they were opened."""

    group_id: str
    stream_id: int
    request: groups_pb2.GroupHeartbeatRequest
    client_host: str


@dataclass(frozen=True, slots=True)
class CommitOffsets:
    """A commit, at a time of the wall clock."""

    group_id: str
    request_id: int
    request: groups_pb2.CommitOffsetsRequest
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class CommitTransactionOffsets:
    """A commit in a transaction that the group's partition has been taken into."""

    group_id: str
    request_id: int
    request: groups_pb2.CommitTransactionOffsetsRequest
    timestamp_ms: int

    @property
    def producer(self) -> Producer:
        """Who commits."""
        return Producer(self.request.producer_id, self.request.producer_epoch)


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark is committed in the partition: it ends what the producer wrote in earlier epochs.

    Of what was written in transactions it came after all up to number ``up_to``, before the rest.
    """

    ended: Producer
    commit: bool
    up_to: int


@dataclass(frozen=True, slots=True)
class FetchOffsets:
    """A question for committed offsets."""

    group_id: str
    request_id: int
    request: groups_pb2.FetchOffsetsRequest


@dataclass(frozen=True, slots=True)
class DescribeGroup:
    """A question for everything about a group."""

    group_id: str
    request_id: int


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """A wish to delete an empty group."""

    group_id: str
    request_id: int


@dataclass(frozen=True, slots=True)
class DeleteOffsets:
    """A wish to forget positions."""

    group_id: str
    request_id: int
    request: groups_pb2.DeleteOffsetsRequest


@dataclass(frozen=True, slots=True)
class ExpireOffsets:
    """It is this time of the wall clock: forget the offsets that were kept long enough."""

    wall_ms: int


@dataclass(frozen=True, slots=True)
class ListGroups:
    """A question for all groups in brief."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TopicsChanged:
    """Topics were made, grew or went. ``removed`` are the ids of those that went.

    ``moved`` are the names of those that have replicas in other racks than before (KIP-881).
    """

    names: frozenset[str]
    removed: frozenset[TopicId] = frozenset()
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Loaded:
    """All records were replayed: the state may be served, and timeouts start anew."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed."""


Request = (
    CommitOffsets
    | CommitTransactionOffsets
    | FetchOffsets
    | DescribeGroup
    | DeleteGroup
    | DeleteOffsets
)
"""What somebody asks of one group, and is answered once."""

Happening = ExpireOffsets | TopicsChanged | Marked | Loaded | Tick
"""What happens to a group."""

GroupEvent = Heartbeat | Request | Happening
"""What one group handles."""

ShardEvent = GroupEvent | ListGroups
"""What a shard of groups handles."""


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Append these records, in order. They become true when committed.

    With a producer they are of its transaction.
    """

    group_id: str
    changes: tuple[Change, ...]
    producer: Producer | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Write to a member's stream. ``is_reply``: it answers one message of the stream."""

    group_id: str
    stream_id: int
    response: groups_pb2.GroupHeartbeatResponse
    is_reply: bool


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer a request. ``group_id`` is None when the answer is about all groups.

    ``in_transaction``: it tells of what was just to be written in a transaction. Where that is
    refused because the transaction has ended, its producer is told so, and nobody else.
    """

    group_id: str | None
    request_id: int
    response: Message
    in_transaction: bool = False


Effect = Persist | Send | Respond
"""What is to be done, in order.

Nothing may be sent or answered about a group before all records of the group that were to be
appended earlier are committed; when that fails, the changes are reverted and the answers become
errors.
"""
