"""The leader's side of a framed connection on which a coordinator brings its marks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import Final

import grpc

from penstock.broker.replication.ports import BeginMarkers, MarkersTaken, StreamBrokenError
from penstock.v1 import coordination_pb2

MAX_UNDER_WAY: Final = 64
"""Requests on one connection that are not answered, or whose answers it has not taken yet: several
times what a coordinator has. It bounds what one that never reads makes a leader keep."""


class CoordinatorStream:
    """One coordinator's marks, each request answered when all of it is committed or refused.

    Answers come in any order: a partition that cannot commit holds up its own request alone. Of a
    connection that has ended nothing is answered any more; its marks go on to be committed, and the
    coordinator sends them again. Used on one event loop.
    """

    def __init__(self, stream: MarkersTaken, begin: BeginMarkers) -> None:
        self._stream = stream
        self._begin = begin
        self._under_way = 0
        self._over = False
        self._unsent: deque[coordination_pb2.MarkersAnswer] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the coordinator goes. Raises StreamBrokenError."""
        try:
            await self._stream.read_all(self._heard)
        finally:
            self._over = True
            if self._sender is not None:
                self._sender.cancel()

    def _heard(self, request: coordination_pb2.MarkersRequest) -> None:
        if self._under_way >= MAX_UNDER_WAY:
            raise StreamBrokenError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_UNDER_WAY} requests of marks are unanswered, or their answers are not read; "
                "wait for answers",
                cause="crowded",
            )
        self._under_way += 1
        self._begin(request.request, partial(self._ended, request.sequence))

    def _ended(self, sequence: int, response: coordination_pb2.WriteMarkersResponse) -> None:
        if self._over:
            return
        answer = coordination_pb2.MarkersAnswer(sequence=sequence, response=response)
        with contextlib.suppress(StreamBrokenError):  # Who reads learns of it too.
            if self._sender is None and self._stream.write_now(answer):
                self._under_way -= 1
                return
            self._unsent.append(answer)
            if self._sender is None:
                self._sender = asyncio.create_task(self._send(), name="answers about marks")

    async def _send(self) -> None:
        """Send what the connection did not take at once."""
        try:
            with contextlib.suppress(StreamBrokenError):
                while self._unsent:
                    await self._stream.write(self._unsent.popleft())
                    self._under_way -= 1
        finally:
            self._sender = None
