"""What brokers hear of the metadata: a snapshot, then every committed change, in order.

A broker that comes again names the index that it has, and is told what changed since, as long as
that is still kept. One whose past was given up is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from penstock.raft_meta.change_log import ChangeLog
from penstock.raft_meta.core.encoding import nested
from penstock.raft_meta.guarding import Encoded
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import MetadataDivergedError

Response = controller_pb2.WatchMetadataResponse
_DELTA: Final = Response.DESCRIPTOR.fields_by_name["delta"]


class Watcher:
    """One stream. ``responses`` ends when the feed closes.

    It has nothing but a position in the log that all of them share. One that falls behind that
    log's beginning, since its reader is slow, is given a fresh snapshot.
    """

    def __init__(
        self,
        log: ChangeLog,
        snapshot: Callable[[], asyncio.Future[Encoded]],
        endpoint: Callable[[], controller_pb2.ControllerEndpoint],
        position: int | None,
    ) -> None:
        self._log = log
        self._snapshot = snapshot
        self._endpoint = endpoint
        self._position = position  # None: it needs a snapshot.
        self._news = asyncio.Event()
        self._closed = False

    def notify(self) -> None:
        """The log has changed."""
        self._news.set()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._news.set()

    async def responses(self) -> AsyncIterator[Encoded]:
        """What to send, as it comes: WatchMetadataResponse, encoded once for all watchers."""
        if self._position is not None and not self._closed:
            yield _encoded(None, self._endpoint())
        while not self._closed:
            self._news.clear()
            if self._position is None or not self._log.has(self._position):
                self._position = self._log.end  # What changes from here on is not in it.
                yield await asyncio.shield(self._snapshot())
            elif (response := self._log.at(self._position)) is not None:
                self._position += 1
                yield response
            else:
                await self._news.wait()


def _encoded(
    delta: cluster_pb2.MetadataDelta | None, endpoint: controller_pb2.ControllerEndpoint | None
) -> Encoded:
    data = Response(active_controller=endpoint).SerializeToString()
    if delta is not None:  # Joined as bytes: put into the message it would be copied.
        data += nested(_DELTA, delta.SerializeToString())
    return Encoded(data)


def _first_response(
    encode: Callable[[], cluster_pb2.MetadataDelta], endpoint: controller_pb2.ControllerEndpoint
) -> Encoded:
    return _encoded(encode(), endpoint)


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
        self._log = ChangeLog()
        self._watchers: set[Watcher] = set()
        self._closed = False

    @property
    def told_index(self) -> int:
        """The index of the last change that watchers are told of."""
        return self._log.last_index

    def subscribe(self, known_index: int = 0, known_epoch: int = 0) -> Watcher:
        """A new stream; unsubscribe it in the end.

        It goes on after ``known_index``, where the reader has everything as of controller epoch
        ``known_epoch``, and where nothing since is forgotten; else it begins with a snapshot.

        Raises MetadataDivergedError where what the reader has was given up. Software of before
        names no epoch.
        """
        if known_index > 0 and known_epoch > 0 and self._log.contradicts(known_index, known_epoch):
            raise MetadataDivergedError(
                f"the metadata of controller epoch {known_epoch} up to index {known_index} are not "
                "those that this cluster goes on with: a part of them was given up (penstock "
                "quorum recover); next: start the broker again, and it takes all of them anew"
            )
        position = self._log.position_after(known_index, known_epoch) if known_index > 0 else None
        watcher = Watcher(self._log, self._take_snapshot, self._endpoint, position)
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
        response = _encoded(delta, endpoint if moved else None)
        last = (delta.index, delta.controller_epoch) if delta is not None else None
        self._log.append(response, last)
        self._told = endpoint
        for watcher in self._watchers:
            watcher.notify()

    def replaced(self, index: int, epoch: int) -> None:
        """Tell that the whole state was replaced by a snapshot at this index and epoch."""
        self._log.restart(index, epoch)
        self._told = self._endpoint()
        self._snapshot = None
        for watcher in self._watchers:
            watcher.notify()

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()
