"""The lines of ``tc`` that break a network of namespaces: one switch, and a plug for each end.

What goes over a link is sorted at the switch, at the plug of whoever gets it, by the address of
whoever sent it. So each direction of each link has a queue of its own, and its faults are that
queue's kind: netem, or one that swallows all. What a node's packets suffer wherever they go is
netem at the node's own interface. Nothing here runs anything; ``shapers`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault

INTERFACE: Final = "eth0"
"""A node's own, in its namespace."""
_CLIENTS_CLASS: Final = 0x100
"""Above all ids of nodes."""
_FIRST_HANDLE: Final = 0x200
_LAST_HANDLE: Final = 0x7FFF
"""Above them the kernel gives out its own."""
_WIRE_RATE: Final = "10gbit"
"""As fast as nothing here is: HTB wants a rate of each class."""
_QUANTUM_BYTES: Final = 60_000
_MOST_WAITING: Final = 20_000
_LEAST_WAITING: Final = 32
_PACKET_BYTES: Final = 1_500


def plug(end: int | str) -> str:
    """The switch's interface at which an end is."""
    return CLIENTS if end == CLIENTS else f"node{end}"


class TrafficPlan:
    """Says which lines lead from what was said before to what is wanted now.

    ``addresses`` has all ends, clients too. A queue that stays as it is keeps what waits in it.
    """

    def __init__(self, addresses: Mapping[int | str, str]) -> None:
        self._addresses: Final = dict(addresses)
        self._links: Final = [
            Link(source, target) for target in addresses for source in addresses if source != target
        ]
        self._told: dict[Link, str] = {}
        self._suffering: set[int] = set()
        self._handle = _FIRST_HANDLE
        self._handles: dict[Link, int] = {}

    def begin(self) -> list[str]:
        """At the switch, once: whole links."""
        lines = [f"qdisc add dev {plug(end)} root handle 1: htb" for end in self._addresses]
        for link in self._links:
            at = f"dev {plug(link.target)} parent 1:"
            sender, of_it = self._addresses[link.source], _class(link.source)
            rate = f"rate {_WIRE_RATE} quantum {_QUANTUM_BYTES}"
            lines += [
                f"class add {at} classid {of_it} htb {rate}",
                f"filter add {at} protocol ip prio 1 u32 match ip src {sender}/32 flowid {of_it}",
            ]
        return [*lines, *self.links({})]

    def links(self, faults: Mapping[Link, LinkFault]) -> list[str]:
        """At the switch: from now on these links do that, and all others nothing."""
        lines = []
        for link in self._links:
            wanted = _queue(faults.get(link, LinkFault()))
            if self._told.get(link) != wanted:
                self._told[link] = wanted
                lines.append(
                    f"qdisc replace dev {plug(link.target)} parent {_class(link.source)} "
                    f"handle {self._new_handle(link):x}: {wanted}"
                )
        return lines

    def forget(self) -> None:
        """Nobody knows what came of what was said of links: the next lines say all of it."""
        self._told.clear()

    def packets(self, node: int, fault: PacketFault | None) -> list[str]:
        """At the node, for what it sends from now on; None is nothing any more."""
        at = f"dev {INTERFACE} root"
        lines = []
        if node in self._suffering:
            # First: a kernel takes no netem that doubles beside another one, the old one neither.
            lines.append(f"qdisc del {at}")
            self._suffering.discard(node)
        if fault is not None:
            lines.append(f"qdisc add {at} handle {_FIRST_HANDLE:x}: {_netem_of_packets(fault)}")
            self._suffering.add(node)
        return lines

    def _new_handle(self, link: Link) -> int:
        """Another one each time: netem that is changed keeps whatever is not named anew."""
        taken = {self._handles[one] for one in self._handles if one.target == link.target}
        while True:
            self._handle = _FIRST_HANDLE if self._handle == _LAST_HANDLE else self._handle + 1
            if self._handle not in taken:
                self._handles[link] = self._handle
                return self._handle


def _class(source: int | str) -> str:
    """What a plug takes for this sender's."""
    number = _CLIENTS_CLASS if source == CLIENTS else int(source)
    return f"1:{number:x}"


def _queue(fault: LinkFault) -> str:
    if fault.cut:
        return "blackhole"
    if not (fault.latency_ms or fault.jitter_ms or fault.rate_bytes):
        return f"pfifo limit {_MOST_WAITING}"
    # Jitter is added, and netem's goes both ways.
    half_ms = fault.jitter_ms / 2
    delay = f"delay {fault.latency_ms + half_ms:g}ms {half_ms:g}ms"
    if not fault.rate_bytes:
        # With a rate, be it as high as can be, netem keeps the order of what is late.
        return f"netem limit {_MOST_WAITING} {delay} rate {_WIRE_RATE}"
    # A second's worth waits, as at a narrow router. What comes on top of that is lost.
    waiting = max(_LEAST_WAITING, fault.rate_bytes // _PACKET_BYTES)
    return f"netem limit {waiting} {delay} rate {fault.rate_bytes}bps"


def _netem_of_packets(fault: PacketFault) -> str:
    words = ["netem", f"limit {_MOST_WAITING}"]
    if fault.delay_ms:
        words.append(f"delay {fault.delay_ms:g}ms")
    for name, percent in (
        ("loss", fault.loss),
        ("duplicate", fault.duplicate),
        ("reorder", fault.reorder),
    ):
        if percent:
            words.append(f"{name} {percent:g}%")
    return " ".join(words)
