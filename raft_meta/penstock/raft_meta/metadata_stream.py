"""What brokers hear of the metadata: a snapshot, then every committed change, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from penstock.raft_meta.guarding import Encoded
from penstock.v1 import cluster_pb2, controller_pb2

BUFFERED_CHANGES: Final = 1000
"""A watcher that is further behind is given a fresh snapshot instead."""

Response = controller_pb2.WatchMetadataResponse


class Watcher:
    """One stream. ``responses`` ends when the feed closes."""

    def __init__(self, snapshot: Callable[[], asyncio.Future[Encoded]]) -> None:
        self._snapshot = snapshot
        self._buffer: deque[Encoded] = deque()
        self._wants_snapshot = True
        self._news = asyncio.Event()
        self._closed = False

    def publish(self, response: Encoded) -> None:
        """Have a change sent after what was published before."""
        if self._wants_snapshot:
            return  # The snapshot is taken when it can be sent, and holds this already.
        if len(self._buffer) >= BUFFERED_CHANGES:
            self.restart()
            return
        self._buffer.append(response)
        self._news.set()

    def restart(self) -> None:
        """Have a fresh snapshot sent in place of whatever waits."""
        self._buffer.clear()
        self._wants_snapshot = True
        self._news.set()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._news.set()

    async def responses(self) -> AsyncIterator[Encoded]:
        """What to send, as it comes: WatchMetadataResponse, encoded once for all watchers."""
        while not self._closed:
            self._news.clear()
            if self._wants_snapshot:
                self._wants_snapshot = False  # What changes from here on is not in it.
                yield await asyncio.shield(self._snapshot())
            while self._buffer and not self._closed:
                yield self._buffer.popleft()
            if not self._wants_snapshot and not self._closed and not self._buffer:
                await self._news.wait()


def _first_response(
    encode: Callable[[], cluster_pb2.MetadataDelta], endpoint: controller_pb2.ControllerEndpoint
) -> Encoded:
    return Encoded(Response(delta=encode(), active_controller=endpoint).SerializeToString())


class MetadataFeed:
    """Every watcher of one controller. One event loop.

    ``freeze`` takes everything as it is now; what it returns is called on another thread, since
    encoding much of it takes long. Watchers that come meanwhile share the snapshot.
    """

    def __init__(
        self,
        freeze: Callable[[], Callable[[], cluster_pb2.MetadataDelta]],
        endpoint: Callable[[], controller_pb2.ControllerEndpoint],
    ) -> None:
        self._freeze = freeze
        self._endpoint = endpoint
        self._snapshot: asyncio.Future[Encoded] | None = None  # One of what is true now.
        self._told = controller_pb2.ControllerEndpoint()
        self._watchers: set[Watcher] = set()
        self._closed = False

    def subscribe(self) -> Watcher:
        """A new stream; unsubscribe it in the end."""
        watcher = Watcher(self._take_snapshot)
        if self._closed:
            watcher.close()
        self._watchers.add(watcher)
        return watcher

    def _take_snapshot(self) -> asyncio.Future[Encoded]:
        if self._snapshot is None:
            encode = partial(_first_response, self._freeze(), self._endpoint())
            loop = asyncio.get_running_loop()
            self._snapshot = loop.run_in_executor(None, encode)
            self._snapshot.add_done_callback(self._forget_snapshot)
        return self._snapshot

    def _forget_snapshot(self, snapshot: asyncio.Future[Encoded]) -> None:
        if self._snapshot is snapshot:  # Whoever waits for it has it; it is large.
            self._snapshot = None

    def unsubscribe(self, watcher: Watcher) -> None:
        """Forget a stream."""
        self._watchers.discard(watcher)

    def changed(self, delta: cluster_pb2.MetadataDelta | None) -> None:
        """Tell a committed change, and where the active controller is if that changed."""
        endpoint = self._endpoint()
        moved = endpoint != self._told
        if delta is None and not moved:
            return
        self._snapshot = None
        self._told = endpoint
        if self._watchers:
            change = Response(delta=delta, active_controller=endpoint if moved else None)
            response = Encoded(change.SerializeToString())
            for watcher in self._watchers:
                watcher.publish(response)

    def replaced(self) -> None:
        """Tell that the whole state was replaced by another controller's snapshot."""
        self._told = self._endpoint()
        self._snapshot = None
        for watcher in self._watchers:
            watcher.restart()

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()
