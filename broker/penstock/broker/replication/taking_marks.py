"""The leader's side of a framed connection on which a coordinator brings its marks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from functools import partial
from typing import Final

import grpc

from penstock.broker.replication.frames import FrameError
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
            if self._sender is None and self._write_now(answer):
                self._under_way -= 1
                return
            self._unsent.append(answer)
            if self._sender is None:
                self._sender = asyncio.create_task(self._send(), name="answers about marks")

    def _write_now(self, answer: coordination_pb2.MarkersAnswer) -> bool:
        try:
            return self._stream.write_now(answer)
        except FrameError:
            return self._stream.write_now(_shortened(answer))

    async def _write(self, answer: coordination_pb2.MarkersAnswer) -> None:
        try:
            await self._stream.write(answer)
        except FrameError:
            await self._stream.write(_shortened(answer))

    async def _send(self) -> None:
        """Send what the connection did not take at once."""
        try:
            with contextlib.suppress(StreamBrokenError):
                while self._unsent:
                    await self._write(self._unsent.popleft())
                    self._under_way -= 1
        finally:
            self._sender = None


def _shortened(answer: coordination_pb2.MarkersAnswer) -> coordination_pb2.MarkersAnswer:
    """The same, which was too large for a frame, with one message for each reason.

    It fits: of a partition there is no more in it than in the request, which came in a frame.
    """
    outcomes = [outcome for result in answer.response.results for outcome in result.outcomes]
    counts = Counter(outcome.code for outcome in outcomes)
    told = {0}
    for outcome in outcomes:
        outcome.ClearField("current_leader")
        if outcome.code in told:
            outcome.ClearField("message")
            continue
        told.add(outcome.code)
        if counts[outcome.code] > 1:
            outcome.message += (
                f" (and {counts[outcome.code] - 1} more, of which only the code had room in the "
                "answer)"
            )
    return answer
