"""Connections on which a coordinator's marks go to leaders, where these take them in frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.frames import FrameError
from penstock.broker.replication.ports import MarkersOpener, MarkersStream, StreamBrokenError
from penstock.broker.replication.unanswered import Unanswered
from penstock.v1 import coordination_pb2, replication_pb2
from penstock.wire.errors import NetworkError, PenstockError

TIMEOUT_MS: Final = 30_000
"""So long a leader may take, which gives up by itself before. After it the connection is ended."""

_MIN_REST_MS: Final = 1_000
_MAX_REST_MS: Final = 60_000

OnAnswer = Callable[[coordination_pb2.WriteMarkersResponse | PenstockError], object]
"""Called once: with the answer, or with why it is not known what became of the marks."""

log = structlog.get_logger()


class _Address(NamedTuple):
    """Whom a connection leads to: a broker that registered anew may be another process."""

    node_id: int
    host: str
    port: int
    broker_epoch: int


class MarkStreams:
    """One connection to each leader that marks go to. Used on one event loop.

    Nobody waits for a connection: while there is none, or where there can be none, ``ask`` says no,
    and the marks are to go another way. ``broker_epoch`` is this broker's own registration.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        open_stream: MarkersOpener,
        *,
        broker_epoch: Callable[[], int],
        clock_ms: Callable[[], int],
    ) -> None:
        self.node_id = node_id
        self.open_stream = open_stream
        self.broker_epoch = broker_epoch
        self.clock_ms = clock_ms
        self._image = image
        self._links: dict[int, _Link] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self._image.cluster_id

    def ask(
        self, node_id: int, message: coordination_pb2.WriteMarkersRequest, on_answer: OnAnswer
    ) -> bool:
        """Send a leader marks if there is a connection that takes them now.

        ``on_answer`` is called later, never before this returns, and also when the connection ends.
        False: nothing was sent, and it is not called; a connection may be there the next time.
        """
        address = self._address(node_id)
        link = self._links.get(node_id)
        if link is not None and link.address != address:
            self._drop(node_id)
            link = None
        if address is None:
            return False
        if link is None:
            link = self._links[node_id] = _Link(address, self)
        return link.ask(message, on_answer)

    def on_metadata(self) -> None:
        """End connections to brokers that are gone, or have registered anew: who waits there is
        told at once, whatever the network makes of it.
        """
        for node_id, link in list(self._links.items()):
            if link.address != self._address(node_id):
                self._drop(node_id)

    async def stop(self) -> None:
        """End all connections; return when nothing is left of them, or of any before."""
        for node_id in list(self._links):
            self._drop(node_id)
        while self._ending:
            await asyncio.wait(self._ending)

    def _drop(self, node_id: int) -> None:
        task = self._links.pop(node_id).end()
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _address(self, node_id: int) -> _Address | None:
        record = self._image.brokers.get(node_id)
        if record is None:
            return None
        return _Address(node_id, record.host, record.port, record.broker_epoch)


class _Link:
    """The connection to one broker, or the attempt to have one."""

    def __init__(self, address: _Address, streams: MarkStreams) -> None:
        self.address = address
        self._streams = streams
        self._stream: MarkersStream | None = None
        self._proved = False  # Whether it has brought an answer.
        self._asked: dict[int, OnAnswer] = {}
        self._sequence = 0
        self._unanswered = Unanswered(streams.clock_ms, TIMEOUT_MS, self._overdue)
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._told: str | None = None  # Why it last ended, to be logged once.
        self._rests_until_ms = streams.clock_ms()
        self._rest_ms = _MIN_REST_MS

    def ask(self, message: coordination_pb2.WriteMarkersRequest, on_answer: OnAnswer) -> bool:
        """See MarkStreams.ask."""
        if self._stream is None:
            self._connect()
            return False
        sequence = self._sequence + 1
        try:
            request = coordination_pb2.MarkersRequest(sequence=sequence, request=message)
            if not self._stream.write_now(request):
                return False
        except (StreamBrokenError, FrameError):
            return False
        self._sequence = sequence
        self._asked[sequence] = on_answer
        self._unanswered.sent(sequence)
        return True

    def end(self) -> asyncio.Task[None] | None:
        """Be of no more use; who waits for an answer is told. What is left ends with the task."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
        return self._task

    def _connect(self) -> None:
        if self._task is None and not self._over:
            if self._streams.clock_ms() < self._rests_until_ms:
                return
            self._task = asyncio.create_task(
                self._run(), name=f"marks for broker {self.address.node_id}"
            )

    async def _run(self) -> None:
        """Hold a connection for as long as it lasts."""
        address = self.address
        reason: str | None = None
        try:
            reason = await self._session()
        except StreamBrokenError as error:
            reason = error.reason
        except Exception as error:
            log.exception("connection for marks failed", leader=address.node_id)
            reason = repr(error)
        finally:
            self._task = None
            self._rests_until_ms = self._streams.clock_ms() + self._rest_ms
            self._rest_ms = min(2 * self._rest_ms, _MAX_REST_MS)
        if reason != self._told:
            self._told = reason
            log.info("marks go by calls", leader=address.node_id, reason=reason)

    async def _session(self) -> str:
        """One connection until it ends; why it ended. Raises StreamBrokenError."""
        node_id, host, port, _ = self.address
        hello = replication_pb2.FollowerHello(
            cluster_id=self._streams.cluster_id,
            node_id=self._streams.node_id,
            broker_epoch=self._streams.broker_epoch(),
        )
        stream = await self._streams.open_stream(node_id, host, port, hello)
        if stream is None:
            self._rest_ms = _MAX_REST_MS
            return "it takes them no other way, or its port for frames does not serve"
        self._stream, self._proved = stream, False
        try:
            await stream.read_all(self._heard)
        finally:
            self._stream = None
            stream.cancel()
            self._give_up()
        return "the leader ended the connection"

    def _heard(self, answer: coordination_pb2.MarkersAnswer) -> None:
        if not self._proved:
            # Not before: a leader may let a coordinator in and end the connection at once.
            self._proved = True
            self._rest_ms, self._told = _MIN_REST_MS, None
            log.info("marks go in frames", leader=self.address.node_id)
        on_answer = self._asked.pop(answer.sequence, None)
        if on_answer is not None:
            self._unanswered.answered(answer.sequence)
            on_answer(answer.response)

    def _give_up(self) -> None:
        self._unanswered.clear()
        asked, self._asked = self._asked, {}
        for on_answer in asked.values():
            on_answer(NetworkError(f"the connection to broker {self.address.node_id} ended"))

    def _overdue(self, _sequence: int, age_ms: int) -> None:
        log.warning(
            "connection for marks ended: a request is unanswered",
            leader=self.address.node_id,
            unanswered_ms=age_ms,
        )
        if self._stream is not None:
            self._stream.cancel()
