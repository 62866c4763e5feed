"""The nodes of a simulated cluster: their machines, and the processes that come and go on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from penstock.broker.core.log_copy import LogCopy
from penstock.chaos.simulator.ageing import Ages
from penstock.chaos.simulator.broker import BrokerPlace, SimulatedBroker
from penstock.chaos.simulator.chance import Chance
from penstock.chaos.simulator.checkers import Checkers
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.controller import ControllerPlace, SimulatedController
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.network import Network
from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.chaos.simulator.plan import Plan
from penstock.chaos.simulator.quorum import Quorum
from penstock.chaos.simulator.scheduler import Clock, Scheduler
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.sessions import LivenessSettings
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicIdPartition

CONTROLLERS: Final = 3
_SNAPSHOT_EVERY: Final = 15
_AT_ONCE: Final = 0.3  # Of the logs that are damaged; the others do not open.
_POWER_LOSSES: Final = 0.3  # Of the restarts at which a log is damaged.
_RESTART_MS: Final = 100
_LIVENESS: Final = LivenessSettings(
    session_timeout_ms=1500,
    disconnect_grace_ms=60,
    takeover_grace_ms=400,
    shutdown_wait_ms=500,
    balance_interval_ms=1500,
    retry_ms=50,
)


@dataclass(slots=True)
class Node:
    """One machine. Its processes are None while they are down."""

    node_id: int
    disk: Disk
    clock: Clock
    snapshot: bytes | None = None
    broker: SimulatedBroker | None = None
    controller: SimulatedController | None = None
    starts: int = 0


class Cluster:
    """All nodes, and what lies between them. ``on_entry`` hears of every entry first applied."""

    def __init__(
        self,
        seed: int,
        plan: Plan,
        scheduler: Scheduler,
        on_entry: Callable[[ClusterState, cluster_pb2.Command], None],
    ) -> None:
        self.seed = seed
        self.scheduler = scheduler
        self._plan = plan
        self.network = Network(
            scheduler, Chance(f"{seed}/network"), late=plan.late, left_over=plan.left_over
        )
        self.quorum = Quorum(scheduler, self.network, Chance(f"{seed}/quorum"), CONTROLLERS)
        self.nodes = {
            node_id: Node(
                node_id,
                Disk(
                    scheduler,
                    Chance(f"{seed}/disk {node_id}"),
                    plan.flush_policy,
                    hands_over=plan.hands_over,
                ),
                Clock(scheduler),
            )
            for node_id in plan.nodes
        }
        self.touched: dict[tuple[int, TopicIdPartition], SimulatedPartition] = {}
        disks = {node.node_id: node.disk for node in self.nodes.values()}
        self.checkers = Checkers(disks, hands_over=plan.hands_over)
        self._on_entry = on_entry
        self._rng = Chance(f"{seed}/nodes")
        self._ends_after = ""

    # What is there.

    def brokers(self) -> Iterator[SimulatedBroker]:
        """Those that run."""
        for node in self.nodes.values():
            if node.broker is not None:
                yield node.broker

    def hosted(self) -> list[SimulatedPartition]:
        """Every replica of every running broker."""
        return [part for broker in self.brokers() for part in broker.partitions.values()]

    def metadata(self) -> ClusterState:
        """The newest state of a controller that runs."""
        return max(
            (node.controller.state for node in self.nodes.values() if node.controller),
            key=lambda state: state.applied_index,
            default=ClusterState(),
        )

    def administer(self, command: cluster_pb2.Command) -> None:
        """Send a command to the active controller, if it can be reached. Nobody waits for it."""
        active = self.nodes[self.quorum.leader or 1].controller
        if active is not None:
            active.serve("command", command, lambda _: None)

    # Processes.

    def start(self, node_id: int) -> None:
        """Start a node's processes, if they are not running."""
        node = self.nodes[node_id]
        if node.broker is not None:
            return
        node.starts += 1
        self.scheduler.note(f"node {node_id} starts")
        if node_id <= CONTROLLERS:
            place = ControllerPlace(
                self.scheduler, self.network, node.clock, self.quorum, _LIVENESS, self
            )
            node.controller = SimulatedController(node_id, place, node.snapshot)
            self.network.processes[-node_id] = node.controller
        node.broker = SimulatedBroker(
            node_id,
            BrokerPlace(
                scheduler=self.scheduler,
                network=self.network,
                clock=node.clock,
                disk=node.disk,
                rng=Chance(f"{self.seed}/broker {node_id} {node.starts}"),
                controllers=tuple(range(1, CONTROLLERS + 1)),
                touched=self.touched,
                flush_failed=self._flush_failed,
                given_up=self._given_up,
                dropped=self._dropped,
                began=self.checkers.processes.append,
                passes=self._passes,
                scrubs="bit flip" in self._plan.kinds,
                last_epoch=self._plan.last_epoch,
                too_large=self._plan.too_large,
                ages=Ages(
                    self._plan.producer_expiration_ms,
                    self._plan.retention_ms,
                    lambda key, offset: self.checkers.log_of(key).delete_below(offset),
                ),
            ),
        )
        self.network.processes[node_id] = node.broker

    def start_later(self, node_id: int, delay_ms: int) -> None:
        """Start a node's processes in a while."""
        self.scheduler.after(delay_ms, partial(self.start, node_id))

    def crash(self, node_id: int, *, power_loss: bool, lost_disk: bool = False) -> None:
        """End a node's processes without a word."""
        node = self.nodes[node_id]
        broker = node.broker
        if broker is None:
            return
        how = " and loses its disk" if lost_disk else " and loses power" if power_loss else ""
        self.scheduler.note(f"node {node_id} crashes{how}")
        self._end_processes(node, silently=power_loss)
        in_doubt = self.checkers.partitions if power_loss else frozenset(node.disk.failed)
        node.disk.crash(power_loss=power_loss)
        if lost_disk:
            node.disk.replace()
        if lost_disk or self._plan.flush_policy != "commit":
            self.checkers.records_lost(node_id, broker.broker_epoch, in_doubt)

    def _end_processes(self, node: Node, *, silently: bool) -> None:
        self.scheduler.held_until_ms.pop(node.node_id, None)
        for process in (node.broker, node.controller):
            if process is not None:
                process.alive = False
                self.network.ended(process, silently=silently)
        node.broker = node.controller = None

    def _flush_failed(self, node_id: int, key: TopicIdPartition) -> None:
        """What the flush was for is on the disk, or in part, or not: the disk is used no more.

        A broker that has no other disk ends at once.
        """
        self.scheduler.note(f"{key.partition} on {node_id}: a flush fails")
        self.nodes[node_id].disk.runs.doubt()
        if self._rng.random() < 0.5:
            self.crash(node_id, power_loss=True)
            self.start_later(node_id, _RESTART_MS)
        else:
            self.fail_disk(node_id, [key], mended_ms=self._rng.randint(100, 2000))

    def end_after(self, step: str) -> None:
        """Let the process end that takes this step of a transaction next."""
        self._ends_after = step

    def _passes(self, node_id: int, step: str) -> None:
        if step == self._ends_after:
            self._ends_after = ""
            self.scheduler.note(f"node {node_id} has come to: {step}")
            power_loss = self._rng.random() < 0.3
            self.scheduler.after(0, lambda: self.crash(node_id, power_loss=power_loss))
            self.start_later(node_id, self._rng.randint(1, 1500))

    def fail_disk(self, node_id: int, keys: Sequence[TopicIdPartition], *, mended_ms: int) -> None:
        """Take a broker's disk with these logs away; when it is mended the broker is restarted."""
        broker = self.nodes[node_id].broker
        if broker is None:
            return
        broker.fail_logs(keys)
        self.restart_later(broker, mended_ms)

    def restart_later(self, broker: SimulatedBroker, delay_ms: int) -> None:
        """Somebody ends the process, if it still lives then, and starts its node again."""
        node_id = broker.node_id

        def restart() -> None:
            if self.nodes[node_id].broker is broker:
                self.crash(node_id, power_loss=False)
                self.start_later(node_id, self._rng.randint(1, 200))

        self.scheduler.after(delay_ms, restart)

    def shut_down(self, node_id: int, down_for_ms: int) -> None:
        """Stop a node cleanly, and start it again."""
        node = self.nodes[node_id]
        broker = node.broker
        if broker is None:
            return
        broker.shut_down()
        by_ms = self.scheduler.now_ms + 1500

        def wait() -> None:
            if node.broker is not broker:
                return
            if not broker.may_stop and self.scheduler.now_ms < by_ms:
                self.scheduler.after(20, wait)
                return
            for partition in broker.partitions.values():
                mark = partition.replica.high_watermark
                node.disk.high_watermarks[partition.key] = mark
            self._end_processes(node, silently=False)
            in_doubt = frozenset(node.disk.failed)
            node.disk.close(broker.broker_epoch)
            if self._plan.flush_policy != "commit":
                self.checkers.records_lost(node_id, broker.broker_epoch, in_doubt)
            self.start_later(node_id, down_for_ms)

        wait()

    # Damage.

    def _given_up(self, node_id: int, key: TopicIdPartition) -> None:
        """A broker can't mend a log: an operator has it copied anew, if another has all of it."""
        if self.checkers.is_intact_elsewhere(node_id, key):
            broker = self.nodes[node_id].broker
            assert broker is not None
            self.crash(node_id, power_loss=False)
            disk = self.nodes[node_id].disk
            disk.erase(key)
            disk.runs.log_taken_away()
            self.checkers.records_lost(node_id, broker.broker_epoch, [key])
            self.start_later(node_id, _RESTART_MS)

    def _dropped(self, node_id: int, copy: LogCopy) -> None:
        broker = self.nodes[node_id].broker
        assert broker is not None
        self.checkers.log_dropped(node_id, broker.broker_epoch, copy)

    def damage_log(self, node_id: int, rng: Random, *, down_for_ms: int) -> None:
        """Let one of a node's logs not open at its next start, to which it comes soon; or, if it
        runs, be of no use at once.

        One at a time: it is to have a way back that is not a person's. Of what is damaged elsewhere
        as well rather than of others, as that is where a log may be the last to have something.
        """
        disks = [node.disk for node in self.nodes.values()]
        if any(disk.shut for disk in disks):
            return
        node = self.nodes[node_id]
        broker = node.broker
        is_at_once = broker is not None and rng.random() < _AT_ONCE
        if broker is not None and not is_at_once:
            self.crash(node_id, power_loss=rng.random() < _POWER_LOSSES)
            self.start_later(node_id, rng.randint(1, down_for_ms))
        written = [
            key
            for key in node.disk.partitions()
            if key in self.checkers.partitions
            and (contents := node.disk.contents(key)) is not None
            and contents.start < contents.end
        ]
        flipped = [
            key
            for key in written
            if any((disk.contents(key) or Contents()).flipped for disk in disks)
        ]
        if not written:
            return
        key = rng.choice(flipped or written)
        self.scheduler.note(f"{key.partition} on {node_id}: the log is damaged")
        if broker is None or not is_at_once:
            node.disk.damage(key, rng)
        elif key in broker.partitions and key not in node.disk.failed:
            broker.shut_log(broker.partitions[key])

    def put_right(self, node_id: int, key: TopicIdPartition) -> None:
        """A person sees to a log that does not open: has it copied, or mends it by hand."""
        if self.checkers.is_intact_elsewhere(node_id, key):
            self._given_up(node_id, key)
            return
        self.crash(node_id, power_loss=False)
        self.nodes[node_id].disk.put_right(key)
        self.scheduler.note(f"{key.partition} on {node_id}: a person mends the log")
        self.start_later(node_id, _RESTART_MS)

    # What controllers tell.

    def entry_applied(self, node_id: int, state: ClusterState) -> None:
        """A controller applied an entry."""
        if self.checkers.entry_applied(state):
            entry = cluster_pb2.Command.FromString(self.quorum.entries[state.applied_index - 1])
            self._on_entry(state, entry)
        if state.applied_index % _SNAPSHOT_EVERY == 0:
            self.nodes[node_id].snapshot = state.snapshot()
