"""What is between the node processes of the local backend: nothing, or a relay on loopback.

Another one, of network namespaces, is in ``namespaced``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from penstock.chaos.backends.relay import Route
from penstock.chaos.backends.relay_process import Network
from penstock.chaos.cluster import Capability, Link, LinkFault, PacketFault
from penstock.chaos.errors import FaultError
from penstock.cli.cluster_layout import (
    HOST,
    ClusterLayout,
    NodePlan,
    find_base_port,
    prepare_layout,
)

RELAY_HOST: Final = "127.0.0.2"
"""Where nodes are reached, through the relay. The same ports of 127.0.0.1 are the nodes' own."""
FIRST_PORT: Final = 28_000
FRAMES_CALL: Final = "/penstock.v1.Replication/Fetch"
"""What goes over a connection in frames, by the name that it has in gRPC."""


class NodeNetwork(Protocol):
    """Where node processes listen, and what their links and packets can suffer. For one thread."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Of those of a network, what it can do."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """What of it belongs into the plan of a run."""
        ...

    def lay_out(
        self, directory: Path, nodes: int, settings: Mapping[str, str | int] | None
    ) -> ClusterLayout:
        """Make the nodes' directories and settings. Raises PenstockError, FaultError."""
        ...

    def start(self, plans: Sequence[NodePlan]) -> None:
        """Before nodes are started, again if it was stopped. Raises FaultError."""
        ...

    def stop(self) -> None:
        """When they have ended. Idempotent."""
        ...

    def enter(self, node: int) -> Sequence[str]:
        """What stands before the command of a node."""
        ...

    def know(self, pids: Mapping[int, int]) -> None:
        """These processes are those nodes now: others may have the numbers of those gone."""
        ...

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """As a cluster's, of links that there are. Raises FaultError."""
        ...

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """As a cluster's. Raises FaultError."""
        ...


class Loopback:
    """Nothing: nodes are reached where they listen."""

    capabilities: frozenset[Capability] = frozenset()
    versions: Mapping[str, str] = {}

    def lay_out(
        self, directory: Path, nodes: int, settings: Mapping[str, str | int] | None
    ) -> ClusterLayout:
        """At ports of 127.0.0.1 that are free."""
        return _lay_out(directory, nodes, settings, advertised_host=HOST)

    def start(self, plans: Sequence[NodePlan]) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """Nor to stop."""

    def enter(self, node: int) -> Sequence[str]:
        """They run where this process does."""
        return ()

    def know(self, pids: Mapping[int, int]) -> None:
        """It does not matter."""

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """There are none."""
        if faults:
            raise FaultError("there are no links between these nodes; next: see `capabilities`")

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """There are none here."""
        _refuse_packets(fault)


class Relayed:
    """A relay, through which nodes and clients reach nodes."""

    capabilities = frozenset({Capability.CUTS, Capability.LINKS, Capability.MESSAGES})
    versions: Mapping[str, str] = {}

    def __init__(self, seed: int = 0) -> None:
        self._seed: Final = seed
        self._network: Network | None = None
        self._faults: Mapping[Link, LinkFault] = {}

    def lay_out(
        self, directory: Path, nodes: int, settings: Mapping[str, str | int] | None
    ) -> ClusterLayout:
        """At ports of 127.0.0.1 that are free, and reached at 127.0.0.2."""
        return _lay_out(directory, nodes, settings, advertised_host=RELAY_HOST)

    def start(self, plans: Sequence[NodePlan]) -> None:
        """Start the relay."""
        if self._network is None:
            self._network = Network(_routes(plans), self._seed)
            self._network.set_faults(self._faults)

    def stop(self) -> None:
        """End it, and every connection with it."""
        if self._network is not None:
            self._network.close()
            self._network = None

    def enter(self, node: int) -> Sequence[str]:
        """They run where this process does."""
        return ()

    def know(self, pids: Mapping[int, int]) -> None:
        """So that it knows who has connected."""
        if self._network is not None:
            self._network.set_owners({pid: node for node, pid in pids.items()})

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """Also before it is started, for then."""
        if self._network is not None:
            self._network.set_faults(faults)
        self._faults = dict(faults)

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """There are none here."""
        _refuse_packets(fault)


def _refuse_packets(fault: PacketFault | None) -> None:
    if fault is not None:
        raise FaultError(
            "on loopback nodes have no packets of their own; next: take the backend namespaces"
        )


def _lay_out(
    directory: Path,
    nodes: int,
    settings: Mapping[str, str | int] | None,
    *,
    advertised_host: str,
) -> ClusterLayout:
    return prepare_layout(
        directory,
        nodes=nodes,
        base_port=find_base_port(nodes, first=FIRST_PORT, frames=advertised_host != HOST),
        settings=settings,
        advertised_host=advertised_host,
        has_files_beside=True,
    )


def _routes(plans: Sequence[NodePlan]) -> list[Route]:
    return [
        Route(plan.node_id, plan.advertised_host, port, HOST, port, call)
        for plan in plans
        for port, call in (
            (plan.broker_port, ""),
            (plan.controller_port, ""),
            (plan.frames_port, FRAMES_CALL),
        )
    ]
