"""A network in front of a node that a test can cut for some who connect, and heal again."""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.integration.cluster import Cluster

_RESETS = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send RST.


class Cut(enum.Enum):
    """What becomes of packets."""

    SILENT = "silent"
    """They are swallowed: neither end learns of it. What was sent arrives after the cut, as what
    TCP sends again would."""
    RESET = "reset"
    """Connections are reset, those that are there and those that are tried."""


class Network:
    """Passes connections to ``host`` on to the same ports of 127.0.0.1. Safe on any thread.

    ``whose`` tells who connects from a port, by whatever name the test has for it; a cut is between
    one of them and all the ports.
    """

    def __init__(self, host: str, ports: Iterable[int], whose: Callable[[int], int]) -> None:
        self._whose = whose
        self._changed = threading.Condition()
        self._cuts: dict[int, Cut] = {}
        self._open: set[_Connection] = set()
        self._closed = False
        self._listeners: list[socket.socket] = []
        for port in ports:
            listener = socket.create_server((host, port))
            self._listeners.append(listener)
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def cut(self, who: int, how: Cut) -> None:
        """Let nothing pass between that one and the node from now on."""
        with self._changed:
            self._cuts[who] = how
            self._changed.notify_all()
            doomed = [one for one in self._open if one.who == who] if how is Cut.RESET else []
        for one in doomed:
            one.wake()

    def heal(self, who: int) -> None:
        """Let everything pass again."""
        with self._changed:
            del self._cuts[who]
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections and take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            doomed = list(self._open)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Closing alone wakes no thread that accepts.
            listener.close()
        for one in doomed:
            one.wake()

    def passes(self, who: int) -> bool:
        """Wait while packets are swallowed; False once the connection is to be reset."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._cuts.get(who) is not Cut.SILENT)
            return not self._closed and who not in self._cuts

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near, address = listener.accept()
            except OSError:
                return
            made = _Connection(self, near, self._whose(address[1]), port)
            with self._changed:
                self._open.add(made)
            threading.Thread(target=made.run, daemon=True).start()

    def forget(self, connection: _Connection) -> None:
        """The connection has ended."""
        with self._changed:
            self._open.discard(connection)


class _Connection:
    """One connection through a Network, and its other half, made once the network lets it."""

    def __init__(self, network: Network, near: socket.socket, who: int, port: int) -> None:
        self.who = who
        self._network = network
        self._ends = [near]
        self._port = port
        self._is_reset = False

    def wake(self) -> None:
        """Have the threads look at the network; nothing is sent by that."""
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)

    def run(self) -> None:
        """Pass everything on, both ways, until either end or the network ends it."""
        try:
            self._check()
            far = socket.create_connection(("127.0.0.1", self._port), timeout=5)
            far.settimeout(None)
            self._ends.append(far)
            back = threading.Thread(target=self._pump, args=(1, 0), daemon=True)
            back.start()
            self._pump(0, 1)
            back.join()
        except OSError:  # Cut, or nobody listens there now.
            self._is_reset = True
        finally:
            self._network.forget(self)
            for end in self._ends:
                if self._is_reset:
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                end.close()

    def _pump(self, source: int, sink: int) -> None:
        try:
            while data := self._ends[source].recv(65_536):
                self._check()
                self._ends[sink].sendall(data)
            self._check()  # It may have been woken, or this end closed during a cut.
            self._ends[sink].shutdown(socket.SHUT_WR)
        except OSError:
            self._is_reset = True
            self.wake()  # The other half of it has no more to do.

    def _check(self) -> None:
        if not self._network.passes(self.who):
            raise ConnectionResetError


def owners(cluster: Cluster) -> Callable[[int], int]:
    """Which node connects from a port: its id, and 0 for anybody else."""

    def whose(port: int) -> int:
        sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
        for node in cluster.nodes.values():
            if node.process is not None and not sockets.isdisjoint(_files(node.process.pid)):
                return node.node_id
        return 0

    return whose


def _inodes(port: int) -> Iterator[str]:
    """The sockets that are connected from that port, as the kernel has them.

    Not by psutil: it needs socket.inet_ntop, which pysyncobj puts one for Windows in the place of.
    """
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, *others = line.split()
            if int(local.rpartition(":")[2], 16) == port and not remote.endswith(":0000"):
                yield others[6]


def _files(pid: int) -> Iterator[str]:
    """What a process has open. It may end meanwhile."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())
