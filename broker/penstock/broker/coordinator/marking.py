"""Has leaders write the marks that this broker's coordinators send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from penstock.broker.coordinator.mark_streams import TIMEOUT_MS, MarkStreams
from penstock.broker.core import transaction_codec
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_marks import MarkQueue, MarkRequest, Owner
from penstock.broker.core.transaction_values import Participant
from penstock.broker.peers import Peers
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.error_codes import ErrorCode
from penstock.wire.errors import PenstockError, UnknownServerError
from penstock.wire.ids import TopicIdPartition

_TELL_EVERY_MS: Final = 10_000

WriteMarkers = Callable[
    [coordination_pb2.WriteMarkersRequest], Awaitable[coordination_pb2.WriteMarkersResponse]
]
"""What this broker leads itself; see LedTransactions.write_markers."""

OnDone = Callable[[Owner, Sequence[MarkDone]], None]

log = structlog.get_logger()


class ImageLeaders:
    """Leaders of an image."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image

    def exists(self, participant: Participant) -> bool:
        """Whether the topic is known."""
        return self._image.topic_by_id(participant.topic_id) is not None

    def leader_of(self, participant: Participant) -> int | None:
        """The node id of the leader."""
        key = TopicIdPartition(participant.topic_id, participant.partition)
        record = self._image.partition_by_id(key)
        return None if record is None or record.leader < 0 else record.leader


class MarkSender:
    """Sends marks until they are committed, and says so to ``on_done``. Used on one event loop.

    What to send, where and when is MarkQueue's to say. A leader on this broker is called directly,
    another one by ``streams``, and where these have no connection by a unary call.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        peers: Peers,
        local: WriteMarkers,
        *,
        clock_ms: Callable[[], int],
        on_done: OnDone,
        streams: MarkStreams | None = None,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._peers = peers
        self._local = local
        self._clock_ms = clock_ms
        self._on_done = on_done
        self._streams = streams
        self._queue = MarkQueue(ImageLeaders(image))
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._told_ms: dict[int, int] = {}  # By node when it was last said that it does not write.

    @property
    def count(self) -> int:
        """How many transactions have marks on their way."""
        return self._queue.count

    def send(self, owner: Owner, marks: Iterable[Mark]) -> None:
        """Have marks written that belong to ``owner``. Their decision must be committed."""
        self._queue.add(owner, marks)
        self._wake()

    def drop(self, owner: Owner) -> None:
        """Send the marks of ``owner`` no more: another broker does, or it is loaded anew."""
        self._queue.drop(owner)

    def on_metadata(self, change: ImageChange) -> None:
        """Go by what has just been applied to the image."""
        if self._streams is not None:
            self._streams.on_metadata()
        if change.partitions or change.topics or change.removed_topics or change.snapshot:
            self._queue.rerouted()
            self._wake()

    async def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._streams is not None:
            await self._streams.stop()

    def _wake(self) -> None:
        """Send soon: what else comes in this turn of the loop goes together."""
        if not self._woken and not self._stopped:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._woken = False
        if self._stopped:
            return
        now_ms = self._clock_ms()
        for request in self._queue.next_requests(now_ms):
            self._send(request)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ms = self._queue.next_deadline_ms(now_ms)
        if deadline_ms is not None:
            after_s = max(deadline_ms - now_ms, 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(after_s, self._wake)

    def _send(self, request: MarkRequest) -> None:
        message = self._message(request)
        streams = self._streams if request.node_id != self._node_id else None
        if streams is not None and streams.ask(
            request.node_id, message, partial(self._ended, request)
        ):
            return
        task = asyncio.create_task(
            self._call(request, message), name=f"marks for broker {request.node_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(
        self, request: MarkRequest, message: coordination_pb2.WriteMarkersRequest
    ) -> None:
        answer: coordination_pb2.WriteMarkersResponse | PenstockError
        try:
            answer = await self._ask(request.node_id, message)
        except PenstockError as error:
            answer = error
        except Exception as error:
            log.exception("marks not written; trying again", leader=request.node_id)
            answer = UnknownServerError(repr(error))
        self._ended(request, answer)

    def _ended(
        self,
        request: MarkRequest,
        answer: coordination_pb2.WriteMarkersResponse | PenstockError,
    ) -> None:
        """A request has its answer, or nobody knows what became of it: then it is sent again."""
        if self._stopped:
            return
        written: list[list[bool]] | None = None
        if isinstance(answer, PenstockError):
            self._tell(request.node_id, answer.message)
        else:
            try:
                written = self._read(request, answer)
            except PenstockError as error:
                self._tell(request.node_id, error.message)
        done = self._queue.answered(request, written, self._clock_ms())
        for owner, marks in done.items():
            self._on_done(owner, marks)
        self._wake()

    def _message(self, request: MarkRequest) -> coordination_pb2.WriteMarkersRequest:
        return coordination_pb2.WriteMarkersRequest(
            cluster_id=self._image.cluster_id,
            markers=[
                coordination_pb2.TransactionMarker(
                    producer_id=piece.mark.producer_id,
                    producer_epoch=piece.mark.producer_epoch,
                    commit=piece.mark.commit,
                    coordinator_epoch=piece.coordinator_epoch,
                    partitions=transaction_codec.topic_partitions(piece.partitions),
                    kept=transaction_codec.indexes(piece.partitions, piece.mark.kept),
                )
                for piece in request.pieces
            ],
        )

    async def _ask(
        self, node_id: int, message: coordination_pb2.WriteMarkersRequest
    ) -> coordination_pb2.WriteMarkersResponse:
        if node_id == self._node_id:
            return await self._local(message)
        response: coordination_pb2.WriteMarkersResponse = await self._peers.ask(
            node_id, "WriteMarkers", message, TIMEOUT_MS / 1000
        )
        return response

    def _read(
        self, request: MarkRequest, response: coordination_pb2.WriteMarkersResponse
    ) -> list[list[bool]]:
        """By mark and partition, whether the transaction has ended there; people hear why not.

        A partition that is torn has ended its part the other way, for ever, so that no mark will
        ever get there. To wait for that would keep the id, or the group of the attempt, where it is
        and save nothing: it is told as an error, and counts.
        """
        refusals: list[common_pb2.Error] = []
        written = []
        shapes = [len(result.outcomes) for result in response.results]
        if shapes != [len(piece.partitions) for piece in request.pieces]:
            raise UnknownServerError(
                f"broker {request.node_id} was sent {len(request.pieces)} marks, and its answer "
                "is not about them"
            )
        for piece, result in zip(request.pieces, response.results, strict=True):
            written.append(
                [outcome.code in (0, ErrorCode.TRANSACTION_TORN) for outcome in result.outcomes]
            )
            refused = [outcome for outcome in result.outcomes if outcome.code]
            torn = [one.message for one in refused if one.code == ErrorCode.TRANSACTION_TORN]
            if torn:
                _tell_torn(piece.mark, torn)
            refusals += [one for one in refused if one.code != ErrorCode.TRANSACTION_TORN]
        if refusals:
            self._tell(request.node_id, refusals[0].message, len(refusals))
        return written

    def _tell(self, node_id: int, reason: str, count: int | None = None) -> None:
        now_ms = self._clock_ms()
        before_ms = self._told_ms.get(node_id)
        if before_ms is None or now_ms - before_ms >= _TELL_EVERY_MS:
            self._told_ms[node_id] = now_ms
            log.warning(
                "marks not written; trying again", leader=node_id, reason=reason, refused=count
            )


def _tell_torn(mark: Mark, reasons: list[str]) -> None:
    """That a transaction is in halves is for a person.

    It is told once, and again where the transaction is loaded before it was noted that it ended.
    """
    log.error(
        "transaction torn",
        transactional_id=mark.transactional_id,
        producer_id=mark.producer_id,
        producer_epoch=mark.producer_epoch,
        decided="commit" if mark.commit else "abort",
        reasons=reasons,
        next_step="see which records of it the partitions lack or have too many, and make up for "
        "them; nobody else is told, and its transactional id goes on",
    )
