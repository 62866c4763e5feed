"""What becomes of each packet at one node: lost, late, doubled, or let by.

Nothing here touches a socket or a clock; ``packet_queue`` moves the packets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault

OUT: Final = "out"
IN: Final = "in"


@dataclass(frozen=True, slots=True)
class Wire:
    """One link as a node sees it: what it says to a peer, or what clients say to it."""

    direction: str
    peer: str
    """An address of a node, or CLIENTS: everybody who is none."""
    cut: bool = False
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Faults:
    """All that is wrong with the network of one node; JSON on its way to the node."""

    nodes: Sequence[str] = ()
    """The addresses of all nodes: others are clients."""
    wires: Sequence[Wire] = ()
    packets: PacketFault | None = None
    """Of what it sends, as with ``tc-netem`` at its interface."""

    @property
    def needs_out(self) -> bool:
        """Whether what it sends must be looked at."""
        return self.packets is not None or any(one.direction == OUT for one in self.wires)

    @property
    def needs_in(self) -> bool:
        """Whether what it gets must be looked at."""
        return any(one.direction == IN for one in self.wires)

    def to_json(self) -> dict[str, Any]:
        """As it is sent."""
        return asdict(self)


def faults_from_json(entry: Mapping[str, Any]) -> Faults:
    """What ``to_json`` gave."""
    packets = entry["packets"]
    return Faults(
        tuple(entry["nodes"]),
        tuple(Wire(**one) for one in entry["wires"]),
        None if packets is None else PacketFault(**packets),
    )


def wires_of(
    node: int, addresses: Mapping[int, str], faults: Mapping[Link, LinkFault]
) -> list[Wire]:
    """The links that one node carries out: what it says itself, and what clients say to it.

    A link from node to node is the sender's, so that each is carried out once.
    """
    found = []
    for link, fault in faults.items():
        if link.source == node:
            peer = CLIENTS if link.target == CLIENTS else addresses[int(link.target)]
            direction = OUT
        elif link.source == CLIENTS and link.target == node:
            peer, direction = CLIENTS, IN
        else:
            continue
        found.append(
            Wire(direction, peer, fault.cut, fault.latency_ms, fault.jitter_ms, fault.rate_bytes)
        )
    return found


class NodeFaults:
    """What is wrong with the network of each node; tells a node only when that changes.

    ``tell`` may raise: then the node is told again the next time.
    """

    def __init__(self, addresses: Mapping[int, str], tell: Callable[[int, Faults], None]) -> None:
        self._addresses: Final = dict(addresses)
        self._tell: Final = tell
        self._links: Mapping[Link, LinkFault] = {}
        self._packets: dict[int, PacketFault] = {}
        whole = Faults(tuple(addresses.values()))
        self._told: dict[int, Faults | None] = dict.fromkeys(addresses, whole)

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing."""
        self._links = dict(faults)
        self._tell_all()

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """From now on what the node sends suffers this; None heals it."""
        if fault is None:
            self._packets.pop(node, None)
        else:
            self._packets[node] = fault
        self._tell_all()

    def _tell_all(self) -> None:
        for node in self._addresses:
            faults = Faults(
                tuple(self._addresses.values()),
                tuple(wires_of(node, self._addresses, self._links)),
                self._packets.get(node),
            )
            if self._told[node] != faults:
                self._told[node] = None  # Until it has heard.
                self._tell(node, faults)
                self._told[node] = faults


@dataclass(slots=True)
class _WireState:
    wire: Wire
    free_at: float = 0.0
    """When all that was taken in has gone out, at the wire's rate."""
    last_due: float = field(default=0.0)


class Fates:
    """Decides packet by packet. Not safe to share between threads."""

    def __init__(self, random: Random) -> None:
        self._random: Final = random
        self._nodes: frozenset[str] = frozenset()
        self._wires: dict[tuple[str, str], _WireState] = {}
        self._packets: PacketFault | None = None

    def change(self, faults: Faults) -> None:
        """From now on this is wrong, and nothing else."""
        self._nodes = frozenset(faults.nodes)
        self._wires = {(one.direction, one.peer): _WireState(one) for one in faults.wires}
        self._packets = faults.packets

    def decide(self, direction: str, peer: str, size: int, now: float) -> list[float]:
        """When each copy of a packet goes on, in seconds of the caller's clock; none: it is lost.

        The first is the packet itself, the others are doubles of it.
        """
        state = self._wires.get((direction, peer if peer in self._nodes else CLIENTS))
        if state is not None and state.wire.cut:
            return []
        due, copies = now, 1
        if self._packets is not None and direction == OUT:
            if self._happens(self._packets.loss):
                return []
            copies += self._happens(self._packets.duplicate)
            # As in tc-netem: those that are reordered overtake the others, which are late.
            if not self._happens(self._packets.reorder):
                due += self._packets.delay_ms / 1000
        if state is not None:
            due = self._on_wire(state, size, due)
        return [due] * copies

    def _on_wire(self, state: _WireState, size: int, due: float) -> float:
        wire = state.wire
        if wire.rate_bytes is not None:
            due = state.free_at = max(due, state.free_at) + size / max(1, wire.rate_bytes)
        if wire.latency_ms or wire.jitter_ms:
            due += (wire.latency_ms + self._random.uniform(0, wire.jitter_ms)) / 1000
        # A link keeps the order; that packets overtake each other is a fault of its own.
        if self._packets is None:
            due = state.last_due = max(due, state.last_due)
        return due

    def _happens(self, percent: float) -> bool:
        return percent > 0 and self._random.uniform(0, 100) < percent
