"""What replication asks of the rest of the broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from penstock.broker.core.ports import DamagedLogError, Log
from penstock.broker.core.verification import Question
from penstock.v1 import cluster_pb2, controller_pb2, coordination_pb2, replication_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from penstock.wire.laden import Laden

Step = Callable[[], Awaitable[None]] | None
"""A step that was made (None), or what is to be awaited before the next one can be made quickly.
"""


class KeyedLog(Log, Protocol):
    """A log that says whose it is."""

    @property
    def key(self) -> TopicIdPartition:
        """The partition."""
        ...


class LogStore(Protocol):
    """The logs of this broker; penstock.broker.storage.manager.LogManager is the real one."""

    def logs(self) -> Iterable[KeyedLog]:
        """Every log found on the disks or made since."""
        ...

    def get_or_create(
        self,
        topic: str,
        partition: int,
        topic_id: TopicId,
        configs: Mapping[str, str],
        *,
        internal: bool,
        is_new: bool,
    ) -> Log:
        """The partition's log, made if it is not there and was not set aside.

        The log of an ``internal`` topic may use the room that is kept from others. A replica
        ``is_new`` when it was given to this broker since it started: no disk that is away has it.
        Raises StorageError or DiskFullError.
        """
        ...

    async def make_ahead(
        self, wanted: Mapping[TopicIdPartition, TopicPartition], *, is_new: bool
    ) -> None:
        """Make what ``get_or_create`` need not wait for the disk for then. Raises nothing."""
        ...

    def delete(self, key: TopicIdPartition) -> None:
        """Forget the partition's log and remove its files. Nothing happens if there is none."""
        ...

    def set_aside(self, key: TopicIdPartition) -> None:
        """Forget the partition's log but keep its files. Nothing happens if there is none."""
        ...

    def keep_damaged(self, key: TopicIdPartition) -> Path:
        """As ``set_aside``, so that another log can take its place; where the files are now."""
        ...

    def update_configs(self, topic_id: TopicId, configs: Mapping[str, str]) -> None:
        """The configs set on the topic are these now."""
        ...

    def flush_soon(self, log: Log) -> None:
        """Make what was appended durable as the flush policy says; ReplicaManager.on_durable is
        called on the event loop once durable_offset has moved, and when durable_start_offset has.
        """
        ...

    def doubt_run(self) -> None:
        """A disk lost what it had confirmed. The next start does not say that all is there."""
        ...

    def high_watermark(self, key: TopicIdPartition) -> int:
        """The high watermark kept last, 0 for none."""
        ...

    def checkpoint_high_watermark(self, key: TopicIdPartition, high_watermark: int) -> None:
        """Keep the high watermark over a restart. Called often: writing may wait a few seconds."""
        ...


AlterPartition = Callable[
    [cluster_pb2.AlterPartitionCommand], Awaitable[controller_pb2.AlterPartitionResponse]
]
"""Sends a wish to the active controller. Raises PenstockError when the outcome is unknown."""

ReportReplicas = Callable[
    [cluster_pb2.ReportReplicasCommand], Awaitable[controller_pb2.ReportReplicasResponse]
]
"""Reports to the active controller. Raises PenstockError when the outcome is unknown."""

AskCoordinator = Callable[[Question, Callable[[PenstockError | None], None]], object]
"""Asks a transaction's coordinator to take a partition into it. The second argument is called
once, not before this returns: with None when it is in it, durably, else with the refusal."""

ChannelFactory = Callable[[int, str, int], Awaitable[aio.Channel]]
"""Opens a channel to the broker of this node id, which clients reach at this host and port. May
raise AioRpcError."""


class StreamBrokenError(Exception):
    """A stream between brokers ended, or never began. ``cause`` is a word to count it by."""

    def __init__(self, status: grpc.StatusCode, reason: str, *, cause: str = "broken") -> None:
        super().__init__(f"{status.name} {reason}")
        self.status = status
        self.reason = reason
        self.cause = cause


Push = Laden[replication_pb2.ReplicationFetchResponse]
"""One message of a leader, with the records of its pushes beside them."""


class LeaderStream(Protocol):
    """A follower's end of the stream to a leader, whatever carries it."""

    async def read_all(self, handle: Callable[[Push], object]) -> None:
        """Hand each message on, as soon as may be after it came, until the leader ends the stream.

        Raises StreamBrokenError, and what ``handle`` raises.
        """
        ...

    def write_now(self, message: replication_pb2.ReplicationFetchRequest) -> bool:
        """Send a message if the stream takes one without waiting; False if not.

        Raises StreamBrokenError.
        """
        ...

    async def write(self, message: replication_pb2.ReplicationFetchRequest) -> None:
        """Send a message; returns when the stream takes another. Raises StreamBrokenError."""
        ...

    def cancel(self) -> None:
        """End the stream: whoever reads or writes is woken."""
        ...

    async def close(self) -> None:
        """Give back all that the stream holds."""
        ...


class ServedStream(Protocol):
    """A leader's end of the stream to a follower, whatever carries it."""

    async def read_all(
        self, handle: Callable[[replication_pb2.ReplicationFetchRequest], object]
    ) -> None:
        """Hand each message on, as soon as may be after it came, until the follower ends its side.

        Raises StreamBrokenError, and what ``handle`` raises.
        """
        ...

    async def write(self, message: Push) -> None:
        """Send a message; returns when the stream takes another. Raises StreamBrokenError."""
        ...


StreamOpener = Callable[[int, str, int, replication_pb2.FollowerHello], Awaitable[LeaderStream]]
"""Opens a stream to the broker of this node id, which clients reach at this host and port, and says
hello. Raises StreamBrokenError."""

BeginMarkers = Callable[
    [
        coordination_pb2.WriteMarkersRequest,
        Callable[[coordination_pb2.WriteMarkersResponse], object],
    ],
    object,
]
"""Has marks written to what is led here; the second argument is called once, with the answer. Also
before this returns, or from within a change of a partition: it must do no more than hand it on, and
not raise."""


class MarkersStream(Protocol):
    """A coordinator's end of the connection to a leader that takes its marks."""

    async def read_all(self, handle: Callable[[coordination_pb2.MarkersAnswer], object]) -> None:
        """Hand each answer on in the moment in which it comes, until the leader ends its side.

        Raises StreamBrokenError, and what ``handle`` raises.
        """
        ...

    def write_now(self, message: coordination_pb2.MarkersRequest) -> bool:
        """Send a message if the connection takes one without waiting; False if not.

        Raises StreamBrokenError.
        """
        ...

    def cancel(self) -> None:
        """End the connection: whoever reads is woken."""
        ...


class MarkersTaken(Protocol):
    """A leader's end of such a connection."""

    async def read_all(self, handle: Callable[[coordination_pb2.MarkersRequest], object]) -> None:
        """Hand each request on in the moment in which it comes, until the coordinator goes.

        Raises StreamBrokenError, and what ``handle`` raises.
        """
        ...

    def write_now(self, message: coordination_pb2.MarkersAnswer) -> bool:
        """Send a message if the connection takes one without waiting; False if not.

        Raises StreamBrokenError.
        """
        ...

    async def write(self, message: coordination_pb2.MarkersAnswer) -> None:
        """Send a message; returns when the connection takes another. Raises StreamBrokenError."""
        ...


MarkersOpener = Callable[
    [int, str, int, replication_pb2.FollowerHello], Awaitable[MarkersStream | None]
]
"""Connects to the broker of this node id, which clients reach at this host and port, to bring it
marks. None where it takes none so: an older one, or one whose port is out of reach. Raises
StreamBrokenError with its own refusal."""

LeadershipListener = Callable[[str, int, int, bool], None]
"""Called with topic, partition, leader epoch, and whether this broker leads from now on (True)
or no longer (False). Called on the event loop, after the replica has changed."""

ShutListener = Callable[[TopicIdPartition, TopicPartition, DamagedLogError], None]
"""Called on the event loop with a replica whose log does not open, and why."""

_AIO: Any = aio
EOF: Final = _AIO.EOF
"""What reading from a gRPC stream gives at its end (the type stubs do not have it)."""
