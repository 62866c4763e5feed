"""One Produce stream to one broker, in the words of the Sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.core.send_events import (
    Answered,
    Event,
    PartitionAnswer,
    SendRequest,
    StreamBroken,
)
from penstock.client.core.too_large import RequestTooLargeError
from penstock.client.produce_request import OutgoingBatch, OutgoingRequest
from penstock.client.streams import BidiStream
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.errors import NetworkError, PenstockError, error_from_proto

_PRODUCE: Final = "/penstock.v1.Log/Produce"


class ProduceStream:
    """Belongs to one event loop. Reports Answered, and StreamBroken once, through ``on_event``."""

    def __init__(
        self,
        cluster: Cluster,
        node_id: int,
        *,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        transactional_id: str,
        on_event: Callable[[ProduceStream, Event], object],
    ) -> None:
        self.node_id = node_id
        self._cluster = cluster
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._transactional_id = transactional_id
        self._on_event = on_event
        self._stream = BidiStream(
            self._open,
            where=cluster.name_of(node_id),
            what="Log.Produce",
            on_message=self._on_message,
            on_end=self._on_end,
        )

    @property
    def ended(self) -> bool:
        """Whether it takes no more requests."""
        return self._stream.ended

    def send(self, effect: SendRequest[Any]) -> None:
        """Queue a request; those queued go out in order."""
        to_proto = self._cluster.metadata.to_proto
        request = OutgoingRequest(
            effect.correlation_id,
            self._acks,
            self._timeout_ms,
            tuple(
                OutgoingBatch(
                    to_proto(entry.batch.partition), entry.leader_epoch, entry.batch.encoded or b""
                )
                for entry in effect.entries
            ),
            self._transactional_id,
        )
        if self._acks == common_pb2.ACKS_NONE:
            # Nothing is answered: being under way is all that there is to know.
            answers = (PartitionAnswer(None),) * len(effect.entries)
            event = Answered(self.node_id, effect.correlation_id, answers)
            self._stream.send(request, lambda: self._on_event(self, event))
        else:
            self._stream.send(request)

    def cancel(self) -> None:
        """Give the stream up; it reports nothing more."""
        self._stream.cancel()

    def finish(self) -> None:
        """Say that nothing more comes; the broker ends the stream when it has read all."""
        self._stream.finish()

    async def finished(self) -> None:
        """Wait until its task has ended."""
        await self._stream.finished()

    def _open(self) -> Any:
        channel = self._cluster.channel_to(self.node_id)
        produce: Any = channel.stream_stream(
            _PRODUCE,
            request_serializer=OutgoingRequest.to_bytes,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )
        return produce()  # Without an iterator of requests: it is written to later.

    def _on_message(self, response: log_pb2.ProduceResponse) -> None:
        answers = tuple(
            PartitionAnswer(error_from_proto(result.error))
            if result.HasField("error")
            else PartitionAnswer(None, result.base_offset, result.log_append_time_ms)
            for result in response.partitions
        )
        self._on_event(self, Answered(self.node_id, response.correlation_id, answers))

    def _on_end(self, error: PenstockError) -> None:
        if not error.retriable and not isinstance(error, RequestTooLargeError):
            # The stream carries many batches, and the status speaks of none: only the batches'
            # own answers may condemn them.
            error = NetworkError(error.message)
        unsent = frozenset(request.correlation_id for request in self._stream.unwritten)
        self._on_event(self, StreamBroken(self.node_id, error, unsent))
