"""Breaks the network of one node from inside its network namespace, packet by packet.

``python -m penstock.chaos.backends.packet_queue serve SEED`` runs beside a node, with CAP_NET_ADMIN
and CAP_NET_RAW, until it is killed. Packets come to it through the kernel's NFQUEUE, by rules of
``iptables`` that are there only while a fault is; ``packets`` decides what becomes of each.
It says ``ready`` once it is there. ``... set JSON`` tells it the faults, and returns when these
hold; ``... probe`` says whether all of that works here. It needs nothing beyond the standard
library, so that any image of Penstock has it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Final, NamedTuple

from penstock.chaos.backends.packets import IN, OUT, Fates, Faults, faults_from_json

QUEUE: Final = 0
CONTROL: Final = "\0penstock-packets"
"""A socket without a file: whoever is in this network namespace reaches it."""
READY: Final = "ready"
MARK: Final = 0x50
"""On packets that we send anew, so that they do not come to us again."""
_MOST_WAITING: Final = 65_536
_RECEIVE_BYTES: Final = 16 * 1024 * 1024
_ANSWER_S: Final = 20.0
_CHAINS: Final = {OUT: ("OUTPUT", "-o"), IN: ("INPUT", "-i")}

# linux/netfilter/nfnetlink_queue.h and its like.
_NETLINK_NETFILTER: Final = 12
_SUBSYSTEM_QUEUE: Final = 3 << 8
_PACKET, _VERDICT, _CONFIG = 0, 1, 2
_REQUEST, _WITH_ANSWER = 1, 4
_ERROR: Final = 2
_CFG_CMD, _CFG_PARAMS, _CFG_QUEUE_MAXLEN = 1, 2, 3
_CMD_BIND: Final = 1
_COPY_PACKET: Final = 2
_PACKET_HDR, _VERDICT_HDR, _PAYLOAD = 1, 2, 10
_DROP, _ACCEPT = 0, 1
_HOOK_IN: Final = 1
_SO_MARK: Final = 36
_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")


class Queued(NamedTuple):
    """A packet that waits in the kernel for what we say of it."""

    id: int
    direction: str
    payload: bytes

    @property
    def peer(self) -> str:
        """The address at the other end."""
        at = 12 if self.direction == IN else 16
        return socket.inet_ntoa(self.payload[at : at + 4])


def message(kind: int, *attributes: tuple[int, bytes], flags: int = _REQUEST) -> bytes:
    """One message to the kernel's queue."""
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, QUEUE)
    for name, value in attributes:
        body += (
            _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), name) + value + b"\0" * (-len(value) % 4)
        )
    return _HEADER.pack(_HEADER.size + len(body), _SUBSYSTEM_QUEUE | kind, flags, 0, 0) + body


def read_messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The types and bodies of what the kernel sent in one piece."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def read_packet(body: bytes) -> Queued | None:
    """The packet in a message's body; None where it is none of IPv4."""
    found: dict[int, bytes] = {}
    at = 4
    while at + _ATTRIBUTE.size <= len(body):
        length, name = _ATTRIBUTE.unpack_from(body, at)
        if length < _ATTRIBUTE.size:
            break
        found[name & 0x3FFF] = body[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    packet_id, _, hook = struct.unpack_from("!IHB", found[_PACKET_HDR])
    return Queued(packet_id, IN if hook == _HOOK_IN else OUT, found.get(_PAYLOAD, b""))


def verdict(packet_id: int, *, passes: bool) -> bytes:
    """What is to become of a packet, as a message."""
    what = _ACCEPT if passes else _DROP
    return message(_VERDICT, (_VERDICT_HDR, struct.pack("!II", what, packet_id)))


class Waiting:
    """What goes on later, in the order of its time; of the same time, in the order it came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers: Final = count()

    def add(self, due: float, act: Callable[[], None]) -> None:
        """Do it then."""
        heapq.heappush(self._heap, (due, next(self._numbers), act))

    @property
    def next_due(self) -> float | None:
        """When ``run`` has something to do."""
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do all whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()


class PacketQueue:
    """The queue of this network namespace, and who tells it what to do. For one thread."""

    def __init__(self, seed: str) -> None:
        """Bind the queue and listen. Raises OSError."""
        self._fates: Final = Fates(Random(seed))
        self._waiting: Final = Waiting()
        self._chains: set[str] = set()
        self._kernel: Final = _bound_queue()
        self._again: Final = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._again.setsockopt(socket.SOL_SOCKET, _SO_MARK, MARK)
        self._control: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.bind(CONTROL)
        self._control.listen()

    def serve(self) -> None:
        """Until the process ends."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._kernel, selectors.EVENT_READ, self._take_packets)
            ready.register(self._control, selectors.EVENT_READ, self._take_orders)
            while True:
                due = self._waiting.next_due
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                for key, _ in ready.select(wait_s):
                    key.data()
                self._waiting.run(time.monotonic())

    def _take_packets(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # ENOBUFS: the kernel had no room.
            while True:
                for kind, body in read_messages(self._kernel.recv(1 << 18)):
                    if kind == _SUBSYSTEM_QUEUE | _PACKET and (found := read_packet(body)):
                        self._decide(found)

    def _decide(self, packet: Queued) -> None:
        now = time.monotonic()
        dues = self._fates.decide(packet.direction, packet.peer, len(packet.payload), now)
        if not dues:
            self._say(packet.id, passes=False)
            return
        first, *doubles = dues
        if first <= now:
            self._say(packet.id, passes=True)
        else:
            self._waiting.add(first, lambda: self._say(packet.id, passes=True))
        for due in doubles:
            self._waiting.add(due, lambda: self._send_again(packet))

    def _say(self, packet_id: int, *, passes: bool) -> None:
        self._kernel.send(verdict(packet_id, passes=passes))

    def _send_again(self, packet: Queued) -> None:
        with contextlib.suppress(OSError):  # A double that cannot be sent is one that was lost.
            self._again.sendto(packet.payload, (packet.peer, 0))

    # --- orders

    def _take_orders(self) -> None:
        connection, _ = self._control.accept()
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            try:
                self._change(faults_from_json(json.loads(lines.readline())))
                answer = "ok"
            except (OSError, ValueError, KeyError, TypeError) as error:
                answer = f"{error}"
            lines.write(answer.replace("\n", " ") + "\n")

    def _change(self, faults: Faults) -> None:
        self._fates.change(faults)
        for direction, is_needed in ((OUT, faults.needs_out), (IN, faults.needs_in)):
            if is_needed and direction not in self._chains:
                _iptables("-A", direction)
                self._chains.add(direction)
            elif not is_needed and direction in self._chains:
                _iptables("-D", direction)
                self._chains.discard(direction)
        if not self._chains:
            self._waiting.run(math.inf)  # Whole again: nothing waits any more.


def _bound_queue() -> socket.socket:
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    kernel.bind((0, 0))
    kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    bind = struct.pack("!BBH", _CMD_BIND, 0, 0)
    # Packets come as they are on the wire: what the interface would cut up is cut up before.
    params = struct.pack("!IB", 0xFFFF, _COPY_PACKET)
    for attribute in (
        (_CFG_CMD, bind),
        (_CFG_PARAMS, params),
        (_CFG_QUEUE_MAXLEN, struct.pack("!I", _MOST_WAITING)),
    ):
        kernel.send(message(_CONFIG, attribute, flags=_REQUEST | _WITH_ANSWER))
        for kind, body in read_messages(kernel.recv(1 << 16)):
            code = struct.unpack_from("=i", body)[0] if kind == _ERROR else 0
            if code:
                raise OSError(-code, "the kernel gives no queue of packets")
    kernel.setblocking(False)
    return kernel


def _iptables(action: str, direction: str) -> None:
    """Have packets come here, or no more. Raises OSError with what iptables says."""
    chain, interface = _CHAINS[direction]
    # A packet that nobody listens for passes.
    rule = ["iptables", "-w", action, chain, "!", interface, "lo", "-m", "mark", "!", "--mark"]
    rule += [hex(MARK), "-j", "NFQUEUE", "--queue-num", str(QUEUE), "--queue-bypass"]
    done = subprocess.run(rule, capture_output=True, text=True, check=False)  # noqa: S603 - fixed.
    if done.returncode:
        raise OSError(f"{' '.join(rule)}: {done.stderr.strip()}")


def tell(faults: str) -> str:
    """Tell the one that serves here; ``ok``, or what is wrong."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(CONTROL)
        with connection.makefile("rw", encoding="utf-8") as lines:
            lines.write(faults + "\n")
            lines.flush()
            return lines.readline().strip()


def probe() -> str:
    """``ok``, or why packets cannot be broken here."""
    PacketQueue("")
    for direction in (OUT, IN):
        _iptables("-A", direction)
        _iptables("-D", direction)
    return "ok"


def main(arguments: Sequence[str]) -> int:
    """The exit status; what went wrong is said on standard output."""
    try:
        match arguments:
            case ["serve", seed]:
                queue = PacketQueue(seed)
                sys.stdout.write(READY + "\n")
                sys.stdout.flush()
                queue.serve()
                return 0
            case ["set", faults]:
                answer = tell(faults)
            case ["probe"]:
                answer = probe()
            case _:
                answer = "usage: serve SEED | set JSON | probe"
    except OSError as error:
        answer = str(error)
    sys.stdout.write(answer + "\n")
    return 0 if answer == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
