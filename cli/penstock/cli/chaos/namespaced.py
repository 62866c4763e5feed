"""Node processes in network namespaces, with a switch between them: the backend ``namespaces``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from penstock.chaos.backends import namespaces, shapers
from penstock.chaos.cluster import Capability, Link, LinkFault, PacketFault
from penstock.chaos.errors import FaultError, PlanError
from penstock.cli.cluster_layout import (
    DEFAULT_BASE_PORT,
    ClusterLayout,
    NodePlan,
    prepare_layout,
)

_OF_THEM: Final = {shapers.NETEM: "tc netem", shapers.QUEUE: "iptables and nfnetlink_queue"}
_NEXT: Final = "next: take --backend local, which needs none of this, or docker"


class Namespaced:
    """A network namespace for each node (``node_networks.NodeNetwork``).

    ``shaping`` names what breaks links and packets; empty is the quickest that the kernel has.
    Without ``breaks_network`` it is not looked for, and there are no such faults.
    """

    def __init__(
        self, nodes: Sequence[int], *, shaping: str = "", breaks_network: bool = True, seed: int = 0
    ) -> None:
        """Look at what can be here, and find a network that is free. Raises PlanError."""
        if why := namespaces.why_not():
            raise PlanError(f"the backend namespaces cannot be here: {why}; {_NEXT}")
        if shaping not in ("", *_OF_THEM):
            raise PlanError(f"there is no shaping {shaping!r}; next: take of {', '.join(_OF_THEM)}")
        self._nodes: Final = list(nodes)
        self._seed: Final = seed
        try:
            self._shaping: Final = _choose(shaping) if breaks_network else ""
            self._namespaces: Final = namespaces.Namespaces(nodes)
        except FaultError as error:
            raise PlanError(f"the backend namespaces cannot be here: {error}; {_NEXT}") from error
        self._shaper: shapers.Shaper | None = None
        self._is_open = False

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Of those of a network, what it can do."""
        if not self._shaping:
            return frozenset()
        return frozenset({Capability.CUTS, Capability.LINKS, Capability.PACKETS})

    @property
    def versions(self) -> Mapping[str, str]:
        """What breaks the network."""
        return {"shaping": self._shaping} if self._shaping else {}

    def lay_out(
        self, directory: Path, nodes: int, settings: Mapping[str, str | int] | None
    ) -> ClusterLayout:
        """Each at its own address, at the usual ports."""
        return prepare_layout(
            directory,
            nodes=nodes,
            base_port=DEFAULT_BASE_PORT,
            # On the run's own network are its nodes and this machine alone.
            settings={**(settings or {}), "controller.insecure.allow": True},
            has_files_beside=True,
            hosts=[self._namespaces.address(node) for node in self._nodes],
        )

    def start(self, plans: Sequence[NodePlan]) -> None:
        """Make the namespaces."""
        if self._is_open:
            return
        self._namespaces.open()
        self._is_open = True
        if self._shaping:
            self._shaper = shapers.make_shaper(
                self._shaping, self._namespaces, self._nodes, self._seed
            )

    def stop(self) -> None:
        """Remove them, whatever fails before."""
        with ExitStack() as ending:
            if self._is_open:
                ending.callback(self._namespaces.close)
            if self._shaper is not None:
                ending.callback(self._shaper.close)
            self._shaper = None
            self._is_open = False

    def enter(self, node: int) -> Sequence[str]:
        """What has the next command run in the node's namespace."""
        return self._namespaces.enter(node)

    def know(self, pids: Mapping[int, int]) -> None:
        """It does not matter: each has an address of its own."""

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """What waits in a link that changes is lost, as in a cable that is pulled."""
        if any(fault.hold for fault in faults.values()):
            raise FaultError("the backend namespaces holds no messages; next: take local")
        if faults or self._shaper is not None:
            self._require().set_links(faults)

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """Of what a node sends."""
        if fault is not None or self._shaper is not None:
            self._require().set_packets(node, fault)

    def _require(self) -> shapers.Shaper:
        if self._shaper is None:
            raise FaultError(
                "there is nothing here that breaks the network: it was started without, or is not "
                "started; next: see `capabilities`"
            )
        return self._shaper


def _choose(wanted: str) -> str:
    """Raises PlanError where the kernel has not what is wanted, or nothing at all."""
    missing = {kind: why for kind, why in shapers.why_not().items() if not wanted or kind == wanted}
    for kind, why in missing.items():
        if not why:
            return kind
    told = "; ".join(f"{_OF_THEM[kind]}: {why}" for kind, why in missing.items())
    raise PlanError(
        f"the network of namespaces cannot be broken here ({told}); next: load the kernel's "
        "sch_netem, sch_htb and cls_u32, or nfnetlink_queue, or take --backend local"
    )
