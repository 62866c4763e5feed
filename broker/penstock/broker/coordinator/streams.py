"""A member's Heartbeat stream, as the coordinator writes to it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock.v1 import groups_pb2
from penstock.wire.errors import PenstockError

_MAX_QUEUED: Final = 64
"""Messages that a member may leave unread before its stream is ended: it then comes back."""


class MemberStream:
    """Messages to one member, in order. Written by the coordinator, read by the servicer.

    The stream is over when it was ended, or when the member sends no more and every message that
    it sent was answered.
    """

    def __init__(self, stream_id: int, client_host: str) -> None:
        self.stream_id: Final = stream_id
        self.client_host: Final = client_host
        self._queue: deque[groups_pb2.GroupHeartbeatResponse] = deque()
        self._unanswered = 0
        self._open = True  # The member may send more.
        self._ended = False
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent."""
        return self._ended

    def received(self) -> None:
        """The member sent a message, which will be answered by one ``reply``."""
        self._unanswered += 1

    def finish_reading(self) -> None:
        """The member sends no more."""
        self._open = False
        self._news.set()

    def reply(self, response: groups_pb2.GroupHeartbeatResponse) -> None:
        """Answer one message."""
        self._unanswered -= 1
        self.push(response)

    def push(self, response: groups_pb2.GroupHeartbeatResponse) -> None:
        """Send what was not asked for."""
        if self._ended:
            return
        if len(self._queue) >= _MAX_QUEUED:
            self._queue.clear()
            self._ended = True
        else:
            self._queue.append(response)
        self._news.set()

    def end(self, error: PenstockError) -> None:
        """Say why, and end the stream."""
        self.push(groups_pb2.GroupHeartbeatResponse(error=error.to_proto()))
        self._ended = True
        self._news.set()

    def close(self) -> None:
        """End the stream without a word: the connection is gone."""
        self._queue.clear()
        self._ended = True
        self._news.set()

    async def next(self) -> groups_pb2.GroupHeartbeatResponse | None:
        """The next message to write, when there is one; None when the stream is over."""
        while not self._queue:
            if self._ended or not (self._open or self._unanswered):
                self._ended = True
                return None
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()
