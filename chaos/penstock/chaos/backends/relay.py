"""The network between nodes: passes their connections on, as long and as fast as links allow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from penstock.chaos.backends.following import Calls, Follower, Holder
from penstock.chaos.backends.lane import NO_FAULT, Lane, LinkState
from penstock.chaos.backends.owners import Owners, open_files, socket_inode
from penstock.chaos.cluster import CLIENTS, Link, LinkFault

GIVE_UP_S: Final = 924.0
"""So long TCP sends what nobody acknowledges again, before the connection is broken."""
CONNECT_GIVE_UP_S: Final = 127.0
"""So long TCP tries to connect."""

_LATER_S: Final = 0.02
"""How often a lane that is full is looked at again."""
_BUFFER_BYTES: Final = 256 * 1024
_BACKLOG: Final = 1024
_RESETS: Final = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send RST.


@dataclass(frozen=True, slots=True)
class Route:
    """Where a node is reached, and where it listens; ``node`` is its id.

    ``frames_call`` is the call that all of a connection belongs to where HTTP/2 is not spoken.
    """

    node: int
    host: str
    port: int
    target_host: str
    target_port: int
    frames_call: str = ""


class Relay:
    """All routes of a cluster. On one event loop; no method blocks."""

    def __init__(self, give_up_s: float = GIVE_UP_S) -> None:
        self._random = Random("links")
        self._give_up_s = give_up_s
        self._owners = Owners()
        self._links: dict[Link, LinkState] = {}
        self._cut_since: dict[Link, float] = {}
        self._connections: set[_Connection] = set()
        self._listeners: list[socket.socket] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.buffer = bytearray(_BUFFER_BYTES)

    def listen(self, routes: Sequence[Route], seed: int = 0) -> None:
        """Take connections at these; jitter is of the seed. Raises OSError that says where."""
        self._random.seed(f"{seed}/links")
        loop = asyncio.get_running_loop()
        for route in routes:
            try:
                listener = socket.create_server((route.host, route.port), backlog=_BACKLOG)
            except OSError as error:
                message = f"{error.strerror}: {route.host}:{route.port}"
                raise OSError(error.errno, message) from None
            listener.setblocking(False)
            self._listeners.append(listener)
            loop.add_reader(listener, self._accept, listener, route)

    def set_faults(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing."""
        now = time.monotonic()
        stale = set()
        for link in {*faults, *self._links}:
            state = self.link(link)
            fault = faults.get(link, NO_FAULT)
            state.fault = NO_FAULT if fault == NO_FAULT else fault
            if state.fault.cut:
                self._cut_since.setdefault(link, now)
            elif now - self._cut_since.pop(link, now) > self._give_up_s:
                stale.add(link)
        for connection in list(self._connections):
            connection.links_changed(now, stale)
        self._wake()

    def set_owners(self, pids: Mapping[int, int]) -> None:
        """These processes are those nodes from now on."""
        self._owners.know(pids)
        # A node may have connected before we were told of its process.
        files = {pid: open_files(pid) for pid in pids}
        for connection in list(self._connections):
            for pid, node in pids.items():
                if connection.source == CLIENTS and connection.file in files[pid]:
                    connection.move_to(node)
        self._wake()

    def close(self) -> None:
        """End everything."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.abort()

    def link(self, link: Link) -> LinkState:
        """What a link does, to be looked at whenever something is to go over it."""
        found = self._links.get(link)
        if found is None:
            found = self._links[link] = LinkState(self._random)
        return found

    def forget(self, connection: _Connection) -> None:
        """It has ended."""
        self._connections.discard(connection)

    @property
    def change(self) -> asyncio.Event:
        """Set when what links do is next changed."""
        return self._changed

    def _wake(self) -> None:
        """Have connections that are not made yet look at their links."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _accept(self, listener: socket.socket, route: Route) -> None:
        while True:
            try:
                near, address = listener.accept()
            except OSError:
                return
            inode = socket_inode(address[1], route.port)
            connection = _Connection(self, near, self._owners.whose(inode), route, inode)
            self._connections.add(connection)
            task = asyncio.get_running_loop().create_task(connection.open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class _Connection:
    """One connection through the relay: two sockets, and a flow in each direction."""

    def __init__(
        self, relay: Relay, near: socket.socket, source: int | str, route: Route, inode: str
    ) -> None:
        near.setblocking(False)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.source = source
        self.file = f"socket:[{inode}]"
        self._relay = relay
        self._route = route
        self._near = near
        self._far: socket.socket | None = None
        self._flows: list[_Flow] = []
        self._is_over = False

    async def open(self) -> None:
        """Connect to the node as soon as packets pass both ways, and begin."""
        far = socket.socket()
        far.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_GIVE_UP_S):
                await self._shake_hands()
                target = (self._route.target_host, self._route.target_port)
                await asyncio.get_running_loop().sock_connect(far, target)
        except OSError:  # Nobody listens there, or it took too long.
            far.close()
            self.abort()
            return
        except BaseException:
            far.close()
            raise
        if self._is_over:
            far.close()
            return
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._far = far
        self._begin(far)

    async def _shake_hands(self) -> None:
        while True:
            faults = [state.fault for state in self._links()]
            late_s = sum(fault.latency_ms for fault in faults) / 1000
            is_cut = any(fault.cut for fault in faults)
            if not late_s and not is_cut:
                return
            try:
                async with asyncio.timeout(None if is_cut else late_s):
                    await self._relay.change.wait()
            except TimeoutError:  # Nothing changed until the answer was back.
                return

    def _links(self) -> tuple[LinkState, LinkState]:
        node = self._route.node
        return (
            self._relay.link(Link(self.source, node)),
            self._relay.link(Link(node, self.source)),
        )

    def _begin(self, far: socket.socket) -> None:
        call = self._route.frames_call
        calls: Calls = {}
        holders = [
            None if call else Holder(Follower(calls, requests=is_request))
            for is_request in (True, False)
        ]
        there, back = (
            Lane(link, holder, call) for link, holder in zip(self._links(), holders, strict=True)
        )
        buffer = self._relay.buffer
        first = _Flow(self, self._near, far, there, buffer)
        second = _Flow(self, far, self._near, back, buffer)
        self._flows = [first, second]
        for flow in self._flows:
            flow.update(time.monotonic())

    def links_changed(self, now: float, stale: set[Link]) -> None:
        """The links may do something else now; those of ``stale`` were cut for too long."""
        node = self._route.node
        for flow, link in zip(
            self._flows, (Link(self.source, node), Link(node, self.source)), strict=False
        ):
            flow.is_stale = flow.is_stale or link in stale
        for flow in self._flows:
            flow.lane.fault_changed(now)
            flow.update(now)

    def move_to(self, node: int) -> None:
        """It comes from this node, as turns out."""
        self.source = node
        now = time.monotonic()
        for flow, link in zip(self._flows, self._links(), strict=False):
            flow.lane.move_to(link)
            flow.lane.fault_changed(now)
            flow.update(now)

    def broke(self, flow: _Flow) -> None:
        """The flow's sink is gone: its sender is to be told so, over the other direction."""
        other = self._flows[1 if flow is self._flows[0] else 0]
        flow.stop()
        if other.has_ended:
            self.abort()
        else:
            other.reset()

    def flow_ended(self) -> None:
        """A flow has brought the end over; the connection is over with the second one."""
        if all(flow.has_ended for flow in self._flows):
            self._close()

    def abort(self) -> None:
        """Reset both ends."""
        if self._is_over:
            return
        for end in (self._near, self._far):
            if end is not None and end.fileno() >= 0:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        self._close()

    def _close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for flow in self._flows:
            flow.stop()
        self._near.close()
        if self._far is not None:
            self._far.close()
        self._relay.forget(self)


class _Flow:
    """One direction: reads from ``source``, lets the lane decide, writes to ``sink``."""

    def __init__(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        lane: Lane,
        buffer: bytearray,
    ) -> None:
        self.lane = lane
        self.is_stale = False
        self.has_ended = False
        self._connection = connection
        self._source = source
        self._sink = sink
        self._view = memoryview(buffer)
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._is_writing = False  # There is something that the sink had no room for.
        self._is_watching = False  # Its having room is watched for.
        self._has_read_all = False
        self._is_reset = False
        self._timer: asyncio.TimerHandle | None = None

    def update(self, now: float) -> None:
        """Do what can be done, and watch for what is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.has_ended:
            return
        is_cut = self.lane.is_cut
        if not is_cut:
            if self._is_reset:
                self._connection.abort()
                return
            if not self._is_writing and not self._write(now):
                return
            due = self.lane.next_due()
            if due is not None and not self._is_writing:
                self._timer = self._loop.call_later(max(0.0, due - now), self._tick)
            elif not self._has_read_all and not self.lane.wants_more(now):
                self._timer = self._loop.call_later(_LATER_S, self._tick)
        self._watch(
            reading=not is_cut
            and not self._has_read_all
            and not self._is_writing
            and self.lane.wants_more(now),
            writing=not is_cut and self._is_writing,
        )

    def reset(self) -> None:
        """The source has broken off; what was not delivered never will be."""
        self._is_reset = self._has_read_all = True
        self.update(time.monotonic())

    def stop(self) -> None:
        """Do nothing any more."""
        self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watch(reading=False, writing=False)

    def _tick(self) -> None:
        self._timer = None
        self.update(time.monotonic())

    def _watch(self, *, reading: bool, writing: bool) -> None:
        if reading != self._is_reading:
            self._is_reading = reading
            if reading:
                self._loop.add_reader(self._source, self._on_readable)
            else:
                self._loop.remove_reader(self._source)
        if writing != self._is_watching:
            self._is_watching = writing
            if writing:
                self._loop.add_writer(self._sink, self._on_writable)
            else:
                self._loop.remove_writer(self._sink)

    def _on_readable(self) -> None:
        try:
            size = self._source.recv_into(self._view[: self.lane.largest_piece])
        except BlockingIOError:
            return
        except OSError:
            self.reset()
            return
        if self.is_stale:
            self._connection.abort()
            return
        now = time.monotonic()
        if not size:
            self._has_read_all = True
            self.lane.push_end(now)
        elif self.lane.is_plain:
            self._pass_on(self._view[:size])
            if not self._is_writing:
                return
        else:
            self.lane.push(bytes(self._view[:size]), now)
        self.update(now)

    def _pass_on(self, data: memoryview) -> None:
        try:
            sent = self._sink.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._connection.broke(self)
            return
        self.lane.watch(data)
        if sent < len(data):
            self.lane.put_back(bytes(data[sent:]))
            self._is_writing = True

    def _on_writable(self) -> None:
        self._is_writing = False
        self.update(time.monotonic())

    def _write(self, now: float) -> bool:
        """Write what is at the other end by now; False once this direction is over."""
        pieces = self.lane.take(now)
        if not pieces:
            return True
        if self.is_stale:
            self._connection.abort()
            return False
        has_end = pieces[-1] is None
        data = b"".join(piece for piece in pieces if piece is not None)
        try:
            sent = self._sink.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._connection.broke(self)
            return False
        if sent < len(data):
            if has_end:
                self.lane.push_end(now)
            self.lane.put_back(data[sent:])
            self._is_writing = True
        elif has_end:
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)
            self.stop()
            self._connection.flow_ended()
            return False
        return True
