"""Connections that bring no whole requests: bounded by closing some of them.

A request is in memory from its first byte on, and gRPC has no bound but that of each. So it is
looked at what each connection has in parts (penstock.broker.core.unfinished), soon after the
process has grown and once a second else; and where that is more than there may be, those that have
most of it are closed. Of connections that never asked for anything some are closed where a port has
few left, since gRPC turns away whoever comes to a port that has all it may have.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

import structlog

from penstock.broker.core.unfinished import Incoming, idle, too_many
from penstock.broker.service.sockets import Address, Connection, address_of
from penstock.raft_meta.arriving import Arrived
from penstock.wire.transport import MAX_MESSAGE_BYTES

log = structlog.get_logger()

_GLANCE_S: Final = 0.1
"""So often it is asked whether the process has grown: five microseconds."""

_LOOK_S: Final = 1.0
_SEARCH_S: Final = 10.0
"""New connections that have said nothing are found after this, others with the next look."""

_CROWDED_S: Final = 1.0
"""... and after this while a port has few connections left."""

_SURE_S: Final = 0.05
"""What is whole by now is handed over meanwhile, should this loop have been busy."""

_GROWN_PART: Final = 8
"""Grown by this part of what may be in parts, the process is looked at closely."""

_TELL_EVERY_S: Final = 60.0
_STATM: Final = Path("/proc/self/statm")


class UnfinishedObserver(Protocol):
    """What is measured."""

    def client_overfull(self) -> None:
        """A connection was closed that sent too much in part."""
        ...

    def client_idle(self) -> None:
        """A connection was closed that asked for nothing, since there were many."""
        ...


def _nobody() -> Container[str]:
    return ()


class Unfinished:
    """All connections of some ports. Used on one event loop; ``find`` is called in a thread.

    Of more than ``crowd`` connections of a port those are closed that never brought a request.
    ``spared`` names peers, as gRPC does, that are not held to account for what all have together:
    each of them may have one request in part, however large.
    """

    def __init__(
        self,
        max_bytes: int,
        find: Callable[[], Iterable[Connection]],
        observer: UnfinishedObserver,
        *,
        crowd: int = sys.maxsize,
        spared: Callable[[], Container[str]] = _nobody,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_bytes = max_bytes
        self._find = find
        self._observer = observer
        self._crowd = crowd
        self._crowded = False
        self._spared = spared
        self._by_peer: dict[str, Incoming] = {}
        self._by_address: dict[Address, Incoming] = {}
        self._peers: dict[Address, str] = {}
        self._connections: dict[Address, Connection] = {}
        self._news = False  # Somebody called whose connection is not known.
        self._timer: asyncio.TimerHandle | None = None
        self._search: asyncio.Task[None] | None = None
        self._memory: _Memory | None = None
        self._looked_s = self._searched_s = self._loop.time()
        self._looked_bytes = 0
        self._in_doubt = False
        self._told_s = self._told_idle_s = -_TELL_EVERY_S
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """What all have sent in part. On any thread."""
        return self._total_bytes

    def call(self, peer: str) -> Arrived:
        """A call begins; see penstock.raft_meta.arriving."""
        incoming = self._by_peer.get(peer) or self._new(peer)
        incoming.begin_call()
        return incoming.arrived

    def _new(self, peer: str) -> Incoming:
        address = address_of(peer)
        if address is None:
            return Incoming(self._loop.time())  # It has no socket that could be looked at.
        incoming = self._by_address.get(address)
        if incoming is None:
            incoming = self._by_address[address] = Incoming(self._loop.time())
            self._news = True
        self._by_peer[peer] = incoming
        self._peers[address] = peer
        return incoming

    def start(self) -> None:
        """Begin to look. Without this nothing is bounded."""
        self._memory = _Memory()
        self._looked_bytes = self._memory.bytes()
        self._timer = self._loop.call_later(_GLANCE_S, self._glance)

    async def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        if self._memory is not None:
            self._memory.close()

    # --- looking ------------------------------------------------------------------------------

    def _glance(self) -> None:
        now_s = self._loop.time()
        assert self._memory is not None
        memory_bytes = self._memory.bytes()
        grown = memory_bytes - self._looked_bytes > self._max_bytes / _GROWN_PART
        delay_s = _GLANCE_S
        if grown or self._in_doubt or now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._looked_bytes = now_s, memory_bytes
            delay_s = self._look(now_s)
            if self._search is None and (grown or self._news or self._is_search_due(now_s)):
                self._search = self._loop.create_task(self._search_now(), name="find connections")
        self._timer = self._loop.call_later(delay_s, self._glance)

    def _is_search_due(self, now_s: float) -> bool:
        return now_s - self._searched_s >= (_CROWDED_S if self._crowded else _SEARCH_S)

    def _look(self, now_s: float) -> float:
        """Look at all connections; after which time to come again."""
        for address, connection in [*self._connections.items()]:
            moved = connection.transferred()
            if moved is None:
                self._forget(address)
            else:
                self._by_address[address].look(moved.received_bytes, moved.sent_bytes, now_s)
        self._total_bytes = int(sum(each.held_bytes for each in self._by_address.values()))
        chosen = too_many(self._answerable(), self._max_bytes)
        if not chosen:
            self._in_doubt = False
            return _GLANCE_S
        if not self._in_doubt:
            self._in_doubt = True
            return _SURE_S
        for connection, incoming in self._closed(chosen):
            self._tell(connection, incoming, now_s)
        return _SURE_S

    def _answerable(self) -> list[Incoming]:
        """Those that may be closed for what all have together."""
        spared = self._spared()
        return [
            incoming
            for address, incoming in self._by_address.items()
            if incoming.held_bytes > MAX_MESSAGE_BYTES or self._peers.get(address, "") not in spared
        ]

    def _closed(self, chosen: Iterable[Incoming]) -> Iterator[tuple[Connection, Incoming]]:
        """Close these; those of them that there still were."""
        addresses = {id(incoming): address for address, incoming in self._by_address.items()}
        for incoming in chosen:
            connection = self._connections.get(addresses[id(incoming)])
            if connection is not None and connection.shut_down():
                yield connection, incoming
            self._forget(addresses[id(incoming)])

    def _tell(self, connection: Connection, incoming: Incoming, now_s: float) -> None:
        self._observer.client_overfull()
        if now_s - self._told_s < _TELL_EVERY_S:
            return
        self._told_s = now_s
        host, number = connection.address
        log.warning(
            "a client that sent too much of requests in part was disconnected",
            peer=f"{host} port {number}",
            unfinished_bytes=int(incoming.held_bytes),
            port=connection.port,
            all_unfinished_bytes=self._total_bytes,
        )

    # --- finding ------------------------------------------------------------------------------

    async def _search_now(self) -> None:
        """Learn what connections there are."""
        self._news = False
        known = frozenset(self._by_address)
        try:
            found = {each.address: each for each in await asyncio.to_thread(self._listed)}
        except OSError:
            return  # Without descriptors there are no new connections either.
        finally:
            self._search = None
            self._searched_s = self._loop.time()
        self._connections.update(found)
        for address in found.keys() - self._by_address.keys():
            self._by_address[address] = Incoming(self._searched_s)
        for address in known - found.keys():
            self._forget(address)
        self._make_room(found.values())

    def _make_room(self, found: Iterable[Connection]) -> None:
        """Close some that asked for nothing, of ports that have few connections left."""
        by_port: defaultdict[int, list[Incoming]] = defaultdict(list)
        for connection in found:
            by_port[connection.port].append(self._by_address[connection.address])
        self._crowded = any(len(there) > self._crowd for there in by_port.values())
        for port, there in by_port.items():
            closed = len([*self._closed(idle(there, self._crowd))])
            for _ in range(closed):
                self._observer.client_idle()
            if closed and self._searched_s - self._told_idle_s >= _TELL_EVERY_S:
                self._told_idle_s = self._searched_s
                log.warning(
                    "connections that asked for nothing were closed, since there are many",
                    port=port,
                    closed=closed,
                    connections=len(there),
                )

    def _listed(self) -> list[Connection]:
        return [*self._find()]

    def _forget(self, address: Address) -> None:
        self._connections.pop(address, None)
        self._by_address.pop(address, None)
        self._by_peer.pop(self._peers.pop(address, ""), None)


class _Memory:
    """What the process has of the machine's memory."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGESIZE")
        self._file = os.open(_STATM, os.O_RDONLY)

    def bytes(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        os.close(self._file)
