"""What breaks the network of namespaces: ``tc`` with netem, or a queue of packets beside each node.

netem is the kernel's, and quick; a kernel may lack it. The queue (``packet_queue``, which the
backend of containers has too) wants ``iptables`` and the kernel's nfnetlink_queue.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from penstock.chaos.backends import packet_queue
from penstock.chaos.backends.namespaces import Namespaces, Scratch
from penstock.chaos.backends.packets import Faults, NodeFaults
from penstock.chaos.backends.traffic import TrafficPlan
from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault
from penstock.chaos.errors import FaultError

NETEM: Final = "netem"
QUEUE: Final = "nfqueue"
_COMMAND: Final = (sys.executable, "-m", "penstock.chaos.backends.packet_queue")
_ENDS_S: Final = 10.0


class Shaper(Protocol):
    """Whoever carries out what links and packets are to suffer. Raises FaultError."""

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing."""
        ...

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """From now on what the node sends suffers this; None heals it."""
        ...

    def close(self) -> None:
        """End what it has started. Idempotent."""
        ...


def why_not() -> dict[str, str]:
    """By name of each kind, the quicker one first: why it cannot be here, empty if it can.

    For root; raises FaultError where there can be no namespaces at all.
    """
    with Scratch() as scratch:
        queue = scratch.why_fails([*_COMMAND, "probe"])
        if shutil.which("iptables") is None:
            queue = "there is no `iptables`"
        return {NETEM: scratch.why_no_traffic(_all_that_netem_wants()), QUEUE: queue}


def make_shaper(kind: str, namespaces: Namespaces, nodes: Sequence[int], seed: int) -> Shaper:
    """The one of that name, in namespaces that are open. Raises FaultError."""
    if kind == NETEM:
        return NetemShaper(namespaces, nodes)
    return QueueShaper(namespaces, nodes, seed)


class NetemShaper:
    """Queues of the kernel's, at the switch for links and at a node for its packets."""

    def __init__(self, namespaces: Namespaces, nodes: Sequence[int]) -> None:
        self._namespaces: Final = namespaces
        ends: list[int | str] = [*nodes, CLIENTS]
        self._plan: Final = TrafficPlan({end: namespaces.address(end) for end in ends})
        namespaces.tc(self._plan.begin())

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """All or nothing: where one of them is refused, all links are whole."""
        try:
            self._namespaces.tc(self._plan.links(faults))
        except FaultError:
            self._plan.forget()
            with contextlib.suppress(FaultError):
                self._namespaces.tc(self._plan.links({}))
            raise

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """Replaces what was before; where it is refused, the node's packets suffer nothing."""
        lines = self._plan.packets(node, fault)
        try:
            self._namespaces.tc(lines, node)
        except FaultError:
            with contextlib.suppress(FaultError):
                self._namespaces.tc(self._plan.packets(node, None), node)
            raise

    def close(self) -> None:
        """It has no process: the namespaces take it with them."""


class QueueShaper:
    """A process in each node's namespace, as beside a node in a container."""

    def __init__(self, namespaces: Namespaces, nodes: Sequence[int], seed: int) -> None:
        self._namespaces: Final = namespaces
        self._processes: Final[list[subprocess.Popen[bytes]]] = []
        addresses = {node: namespaces.address(node) for node in nodes}
        self._faults: Final = NodeFaults(addresses, self._tell)
        try:
            for node in nodes:
                self._serve(node, f"{seed}/{node}")
        except FaultError:
            self.close()
            raise

    def _serve(self, node: int, seed: str) -> None:
        process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter.
            [*self._namespaces.enter(node), *_COMMAND, "serve", seed],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in the terminal is not for it: links are to be healed first.
        )
        self._processes.append(process)
        assert process.stdout is not None
        said = process.stdout.readline().decode(errors="replace").strip()
        if said != packet_queue.READY:
            raise FaultError(f"the queue of packets of node {node} did not start: {said}")

    def _tell(self, node: int, faults: Faults) -> None:
        command = [*self._namespaces.enter(node), *_COMMAND, "set", json.dumps(faults.to_json())]
        done = subprocess.run(  # noqa: S603 - as above, also of Ctrl-C.
            command, capture_output=True, text=True, check=False, process_group=0
        )
        if done.returncode:
            said = (done.stdout or done.stderr).strip()
            raise FaultError(f"the network of node {node} could not be changed: {said}")

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """One node after the other; where one refuses, all links are made whole."""
        self._or_whole(lambda: self._faults.set_links(faults), lambda: self._faults.set_links({}))

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """Replaces what was before."""
        self._or_whole(
            lambda: self._faults.set_packets(node, fault),
            lambda: self._faults.set_packets(node, None),
        )

    def _or_whole(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        try:
            do()
        except FaultError:
            with contextlib.suppress(FaultError):
                undo()
            raise

    def close(self) -> None:
        """Kill them: they hold nothing."""
        for process in self._processes:
            process.kill()
            process.wait(_ENDS_S)
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()


def _all_that_netem_wants() -> list[str]:
    """A switch with one node, and each kind of queue that there can be."""
    # The addresses are those of a namespace that nobody reaches.
    plan = TrafficPlan({1: "198.18.0.1", CLIENTS: "198.18.0.254"})
    bad = {
        Link(1, CLIENTS): LinkFault(latency_ms=1, jitter_ms=1),
        Link(CLIENTS, 1): LinkFault(cut=True),
    }
    return [*plan.begin(), *plan.links(bad)]
