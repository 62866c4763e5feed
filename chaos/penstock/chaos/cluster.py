"""What the harness may do to a cluster: the contract that every backend fulfils.

A backend has the facilities that it names in ``capabilities``, and no others are called. All calls
block, and are made from one thread at a time. Whatever a call breaks has a call that heals it,
which is idempotent and does not raise for what is gone already; ``heal_all`` does all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

CLIENTS: Final = "clients"
"""The end of a link at which all clients of the run are."""


class Capability(StrEnum):
    """What a backend can do."""

    PROCESSES = "processes"
    """Start, kill and terminate nodes."""
    PAUSES = "pauses"
    """Pause and resume nodes."""
    CUTS = "cuts"
    """Cut both directions between two nodes; other faults of links are refused."""
    LINKS = "links"
    """Cut and slow what goes from one node, or the clients, to another."""
    MESSAGES = "messages"
    """Hold messages of some names alone on a link."""
    PACKETS = "packets"
    """Lose, double and reorder packets: a network of its own for each node."""
    DISKS = "disks"
    """Slow, full and failing disks, syncs that fail, and writes that are lost without a sync."""
    FILES = "files"
    """The nodes' directories can be changed while they are down."""
    CLOCKS = "clocks"
    """Each node's wall clock can be moved."""
    LIMITS = "limits"
    """Descriptors and memory of a node can be limited."""


OFFERED: Final[Mapping[str, frozenset[Capability]]] = {
    "local": frozenset(Capability) - {Capability.PACKETS},
    "namespaces": frozenset(Capability) - {Capability.MESSAGES},
    "docker": frozenset(
        {
            Capability.PROCESSES,
            Capability.PAUSES,
            Capability.CUTS,
            Capability.LINKS,
            Capability.PACKETS,
            Capability.FILES,
        }
    ),
    "kubernetes": frozenset({Capability.PROCESSES, Capability.CUTS}),
}
"""What each backend has where its machine lacks nothing. Schedules are made of this and the seed,
and not of what a machine has, so that a seed means the same faults everywhere."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of what two ends say to each other; an end is a node's id or ``CLIENTS``."""

    source: int | str
    target: int | str


@dataclass(frozen=True, slots=True)
class LinkFault:
    """What a link does to what goes over it, until it is healed.

    ``cut``: nothing comes through, and nobody is told. ``latency_ms`` and ``jitter_ms`` are added
    to each piece; ``rate_bytes`` is the most a second. ``hold``: messages of these names alone wait
    for ``hold_ms``, such as ``Produce`` for the answers to producers.
    """

    cut: bool = False
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_bytes: int | None = None
    hold: Sequence[str] = ()
    hold_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PacketFault:
    """What becomes of the packets that a node sends, in percent of them, as with ``tc-netem``.

    Each is late by ``delay_ms``, but for those that are reordered: they overtake the others.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskFault:
    """What a node's disk does until it is healed.

    ``errno`` is that of each write (``ENOSPC``, ``EIO``), or of each sync where ``of_sync`` is set;
    ``delay_ms`` is added to each write and sync. ``keep_unsynced`` off: what was written from then
    on and not synced is gone when the node is killed, as when power fails. For several nodes at
    once, pause all of them before the first one is killed: nothing is synced in between.
    """

    errno: str = ""
    of_sync: bool = False
    delay_ms: float = 0.0
    keep_unsynced: bool = True


class Cluster(Protocol):
    """A cluster under test. Every node is named by its id."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What of the following it can do."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """All that belong to it, running or not."""
        ...

    @property
    def bootstrap(self) -> str:
        """Where clients begin, through whatever links the backend has laid."""
        ...

    @property
    def running(self) -> Sequence[int]:
        """Those whose process lives, be it paused."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """What takes part besides this process and its libraries, such as an engine."""
        ...

    def start(self) -> None:
        """Start what does not run, and return when all are ready. Raises ClusterError."""
        ...

    def stop(self) -> None:
        """Stop everything and free what it took. Idempotent."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every node serves and every partition has a leader. Raises ClusterError."""
        ...

    # --- processes: Capability.PROCESSES, and pauses: Capability.PAUSES

    def kill(self, node: int) -> None:
        """End it at once, as SIGKILL does, and return when it is gone."""
        ...

    def terminate(self, node: int) -> None:
        """Ask it to stop, as SIGTERM does, and return when it has; by force in the end."""
        ...

    def start_node(self, node: int) -> None:
        """Start one that is down; does not wait until it serves. No-op where it runs."""
        ...

    def pause(self, node: int) -> None:
        """Stop its process in its tracks, as SIGSTOP does."""
        ...

    def resume(self, node: int) -> None:
        """Have it go on."""
        ...

    # --- links: Capability.LINKS (or CUTS alone), and MESSAGES; packets: Capability.PACKETS

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing: an empty mapping heals them."""
        ...

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """From now on the node's packets suffer this; None heals them."""
        ...

    # --- disks: Capability.DISKS, and files: Capability.FILES

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        """From now on the node's disk does this; None heals it."""
        ...

    def data_directory(self, node: int) -> Path:
        """Where it keeps everything but its settings and its log.

        While it runs, it may be read alone.
        """
        ...

    def format(self, node: int) -> None:
        """Make its directory, which is empty, that of a node which has never run; while it is down.

        It may found no cluster, and joins this one.
        """
        ...

    # --- clocks: Capability.CLOCKS, and limits: Capability.LIMITS

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        """From now on its wall clock is off by so much; 0 heals it. Its monotonic one goes on.

        With ``strobe_ms`` it is off for so long, right for so long, and so on.
        """
        ...

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        """From now on, over all of its lives, it may have no more; None is what it had before.

        Of memory what is its own is counted: heap and stacks, not the files that it has mapped.
        """
        ...

    # --- evidence

    def heal_all(self) -> None:
        """Heal whatever is broken, and start whatever is down."""
        ...

    def log(self, node: int) -> Path | None:
        """What it has written for people, over all of its lives; None where that is elsewhere."""
        ...

    def pid(self, node: int) -> int | None:
        """Its process on this machine, to be measured; None where it is elsewhere or down.

        This and ``log`` may be asked from any thread at any time.
        """
        ...
