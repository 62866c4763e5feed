"""One run: a cluster, its clients, what goes wrong, and the verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from google.protobuf import text_format

from penstock.chaos.simulator.broker import BrokerPlace, SimulatedBroker
from penstock.chaos.simulator.checkers import Checkers, Violation, check
from penstock.chaos.simulator.controller import (
    ControllerPlace,
    SimulatedController,
)
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.faults import KINDS, Fault, draw_faults
from penstock.chaos.simulator.network import Network
from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.chaos.simulator.quorum import Quorum
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.workload import ClientPlace, Producer, Reader
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.sessions import LivenessSettings
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

CONTROLLERS: Final = 3
FAULTS_UNTIL_MS: Final = 12_000
RECOVERY_MS: Final = 30_000
_SNAPSHOT_EVERY: Final = 15
_TOPIC: Final = TopicId(b"\1" * 16)
_LIVENESS: Final = LivenessSettings(
    session_timeout_ms=1500,
    disconnect_grace_ms=60,
    takeover_grace_ms=400,
    shutdown_wait_ms=500,
    balance_interval_ms=1500,
    retry_ms=50,
    stall_ms=500,
)


@dataclass(slots=True)
class Report:
    """How a run went. ``violation`` is None when every promise was kept."""

    seed: int
    faults: list[Fault]
    violation: str | None = None
    steps: int = 0
    virtual_ms: int = 0
    acknowledged: int = 0
    read: int = 0
    committed: int = 0
    entries: int = 0
    leaderships: int = 0
    story: list[str] = field(default_factory=list)  # What happened last.

    @property
    def replay(self) -> str:
        """The command that repeats the run; with --story it tells what happened."""
        return f"python -m penstock.chaos.simulator --seed {self.seed}"

    def __str__(self) -> str:
        verdict = "VIOLATION" if self.violation else "ok"
        summary = (
            f"seed {self.seed}: {verdict} after {self.virtual_ms} ms and {self.steps} steps; "
            f"{self.entries} metadata entries, {self.leaderships} leaderships, {self.committed} "
            f"records committed, {self.acknowledged} batches acknowledged by all, {self.read} read"
        )
        lines = [summary]
        if self.violation:
            lines += [f"  {self.violation}", "  what went wrong, and when:"]
            lines += [f"  {fault}" for fault in self.faults]
            lines.append(f"  replay: {self.replay} --story")
        return "\n".join(lines)


@dataclass(slots=True)
class _Node:
    disk: Disk
    snapshot: bytes | None = None
    broker: SimulatedBroker | None = None
    controller: SimulatedController | None = None
    starts: int = field(default=0)


class Simulation:
    """A run of one seed.

    ``faults``: instead of those that the seed draws. ``only``: the seed draws faults of these
    kinds.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] | None = None,
        *,
        only: Collection[str] = KINDS,
    ) -> None:
        self.seed = seed
        self._rng = Random(f"{seed}/cluster")
        node_count = self._rng.choice((3, 3, 3, 4, 5))
        self.nodes = tuple(range(1, node_count + 1))
        chance = Random(f"{seed}/faults")
        drawn = draw_faults(chance, self.nodes, until_ms=FAULTS_UNTIL_MS, only=only)
        self.faults = drawn if faults is None else list(faults)
        self.scheduler = Scheduler(Random(f"{seed}/order"))
        self.network = Network(self.scheduler, Random(f"{seed}/network"))
        self.quorum = Quorum(self.scheduler, self.network, Random(f"{seed}/quorum"), CONTROLLERS)
        self.checkers = Checkers()
        self._touched: dict[tuple[int, TopicIdPartition], SimulatedPartition] = {}
        self._nodes = {
            node: _Node(Disk(self.scheduler, Random(f"{seed}/disk {node}"))) for node in self.nodes
        }
        self._clients: list[Producer | Reader] = []
        self._partitions = tuple(
            TopicIdPartition(_TOPIC, number) for number in range(self._rng.choice((1, 2, 3)))
        )
        self._faulty = True

    # Nodes.

    def start(self, node_id: int) -> None:
        """Start a node's processes, if they are not running."""
        node = self._nodes[node_id]
        if node.broker is not None:
            return
        node.starts += 1
        self.scheduler.note(f"node {node_id} starts")
        if node_id <= CONTROLLERS:
            place = ControllerPlace(self.scheduler, self.network, self.quorum, _LIVENESS, self)
            node.controller = SimulatedController(node_id, place, node.snapshot)
            self.network.processes[-node_id] = node.controller
        node.broker = SimulatedBroker(
            node_id,
            BrokerPlace(
                scheduler=self.scheduler,
                network=self.network,
                disk=node.disk,
                rng=Random(f"{self.seed}/broker {node_id} {node.starts}"),
                controllers=tuple(range(1, CONTROLLERS + 1)),
                touched=self._touched,
                restart=self._restart,
            ),
        )
        self.network.processes[node_id] = node.broker

    def crash(self, node_id: int, *, power_loss: bool) -> None:
        """End a node's processes without a word."""
        node = self._nodes[node_id]
        broker = node.broker
        if broker is None:
            return
        self.scheduler.note(f"node {node_id} crashes{' and loses power' if power_loss else ''}")
        self._end_processes(node, silently=power_loss)
        node.disk.crash(power_loss=power_loss)

    def _end_processes(self, node: _Node, *, silently: bool) -> None:
        for process in (node.broker, node.controller):
            if process is not None:
                process.alive = False
                self.network.ended(process, silently=silently)
        node.broker = node.controller = None

    def _restart(self, node_id: int) -> None:
        self.crash(node_id, power_loss=False)
        self.scheduler.after(100, lambda: self.start(node_id))

    def _shut_down(self, node_id: int, down_for_ms: int) -> None:
        """Stop a node cleanly, and start it again."""
        broker = self._nodes[node_id].broker
        if broker is None:
            return
        broker.shut_down()
        by_ms = self.scheduler.now_ms + 1500

        def wait() -> None:
            node = self._nodes[node_id]
            if node.broker is not broker:
                return
            if not broker.may_stop and self.scheduler.now_ms < by_ms:
                self.scheduler.after(20, wait)
                return
            for partition in broker.partitions.values():
                mark = partition.replica.high_watermark
                node.disk.high_watermarks[partition.key] = mark
            self._end_processes(node, silently=False)
            node.disk.close(broker.broker_epoch)
            self.scheduler.after(down_for_ms, lambda: self.start(node_id))

        wait()

    def entry_applied(self, node_id: int, state: ClusterState) -> None:
        """A controller applied an entry."""
        if self.checkers.entry_applied(state):
            entry = cluster_pb2.Command.FromString(self.quorum.entries[state.applied_index - 1])
            told = text_format.MessageToString(entry, as_one_line=True, print_unknown_fields=True)
            self.scheduler.note(f"entry {state.applied_index}: {told}")
        if state.applied_index % _SNAPSHOT_EVERY == 0:
            self._nodes[node_id].snapshot = state.snapshot()

    # Faults.

    def _strike(self, fault: Fault) -> None:
        if not self._faulty:
            return
        match fault.kind:
            case "kill" | "power loss" | "power loss everywhere":
                self._down(fault.nodes, fault)
            case "kill leader":
                self._down(self._leaders()[:1], fault)
            case "restart":
                self._shut_down(fault.nodes[0], fault.for_ms)
            case "split" | "one way" | "slow network" | "slow disk":
                self._disturb(fault)
            case "another controller":
                self.quorum.elect()
            case "stale entry":
                if self.quorum.entries:
                    self.quorum.replay(self._rng.choice(self.quorum.entries))
            case "min isr":
                self._change_min_isr()
            case "delete records":
                self._delete_records()
            case "move":
                self._move(self._rng.choice(self._partitions), self._drawn_replicas())

    def _down(self, nodes: Sequence[int], fault: Fault) -> None:
        for node_id in nodes:
            self.crash(node_id, power_loss=fault.kind.startswith("power loss"))
            back_ms = self._rng.randint(1, fault.for_ms)
            self.scheduler.after(back_ms, partial(self.start, node_id))

    def _leaders(self) -> list[int]:
        return [
            node_id
            for node_id, node in self._nodes.items()
            if node.broker is not None
            and any(partition.is_leader for partition in node.broker.partitions.values())
        ]

    def _disturb(self, fault: Fault) -> None:
        network = self.network
        if fault.kind == "slow disk":
            disk = self._nodes[fault.nodes[0]].disk
            disk.slow_ms = fault.for_ms // 3
            self.scheduler.after(fault.for_ms, disk.hurry)
            return
        self.scheduler.after(fault.for_ms, network.heal)
        if fault.kind == "slow network":
            network.slow_ms.update(dict.fromkeys(fault.nodes, fault.for_ms // 10))
        elif fault.kind == "one way":
            network.cut(*fault.nodes)
        else:
            for near in fault.nodes:
                for far in sorted(set(self.nodes).difference(fault.nodes)):
                    network.cut(near, far)
                    network.cut(far, near)

    def _change_min_isr(self) -> None:
        body = cluster_pb2.AlterTopicConfigsCommand(topic="simulated")
        body.set["min.insync.replicas"] = str(self._rng.randint(1, 2))
        self._administer(cluster_pb2.Command(alter_topic_configs=body))

    def _drawn_replicas(self) -> list[int]:
        """None at times, which cancels."""
        count = self._rng.choice((0, 1, 2, 2, 2, 3, 3))
        return self._rng.sample(self.nodes, count)

    def _move(self, key: TopicIdPartition, replicas: Sequence[int]) -> None:
        body = cluster_pb2.AlterReassignmentsCommand()
        body.partitions.add(topic_id=key.topic_id, partition=key.partition, replicas=replicas)
        self._administer(cluster_pb2.Command(alter_reassignments=body))

    def _move_back(self) -> None:
        """Again and again: to three replicas, as those who wait for the end expect."""
        for key in self._partitions:
            self._move(key, self.nodes[:3])
        self.scheduler.after(1000, self._move_back)

    def _delete_records(self) -> None:
        for partition in self._hosted():
            if partition.is_leader:
                start, end = partition.log.log_start_offset, partition.replica.high_watermark
                offset = self._rng.randint(start, end)
                self.checkers.log_of(partition.key).delete_below(offset)
                partition.delete_below(offset)

    def _administer(self, command: cluster_pb2.Command) -> None:
        active = self._nodes[self.quorum.leader or 1].controller
        if active is not None:
            active.serve("command", command, lambda _: None)

    # The run.

    def run(self) -> Report:
        """Run to the end, or to the first broken promise."""
        report = Report(self.seed, self.faults)
        try:
            self._run()
        except AssertionError as error:
            report.violation = str(error) or repr(error)
            if not isinstance(error, Violation):
                report.violation = f"an invariant of a core: {report.violation}"
        except Exception as error:
            report.violation = f"a core raised {error!r}"
        report.story = list(self.scheduler.story)
        report.steps = self.scheduler.steps
        report.virtual_ms = self.scheduler.now_ms
        report.acknowledged = self.checkers.acknowledged
        report.read = self.checkers.read
        report.committed = sum(log.end for log in self.checkers.committed.values())
        report.entries = len(self.quorum.entries)
        report.leaderships = self.checkers.leaderships
        return report

    def _run(self) -> None:
        for node_id in self.nodes:
            self.start(node_id)
        self._until("the brokers are there", 20_000, self._all_unfenced)
        self._create_topic()
        self._until("the topic is there", 5_000, self._all_host)
        self._start_clients()
        for fault in self.faults:
            self.scheduler.after(fault.at_ms, partial(self._strike, fault))
        self.scheduler.run_until(self.scheduler.now_ms + FAULTS_UNTIL_MS, self._after_step)
        self._faulty = False
        self.network.calm()
        if any(fault.kind == "move" for fault in self.faults):
            self._move_back()
        for node in self._nodes.values():
            node.disk.hurry()
        for node_id in self.nodes:
            self.scheduler.after(self._rng.randint(0, 500), partial(self.start, node_id))
        for client in self._clients:
            if isinstance(client, Producer):
                client.stop()
        self._until("everything is in order again", RECOVERY_MS, self._all_in_order)
        self.checkers.at_rest(self._hosted())

    def _after_step(self) -> bool:
        if self._touched:
            touched = list(self._touched.values())
            self._touched.clear()
            self.checkers.after_step(touched)
        return False

    def _until(self, what: str, patience_ms: int, condition: object) -> None:
        assert callable(condition)

        def reached() -> bool:
            self._after_step()
            # Conditions look at everything: not after each step.
            return self.scheduler.steps % 50 == 0 and bool(condition())

        done = self.scheduler.run_until(self.scheduler.now_ms + patience_ms, reached)
        check(done or bool(condition()), f"not within {patience_ms} ms: {what}; {self._state()}")

    def _create_topic(self) -> None:
        body = cluster_pb2.CreateTopicCommand(
            name="simulated",
            topic_id=_TOPIC,
            partition_count=len(self._partitions),
            replication_factor=3,
        )
        body.configs["min.insync.replicas"] = str(self._rng.choice((1, 2, 2, 2)))
        self._administer(cluster_pb2.Command(create_topic=body))

    def _start_clients(self) -> None:
        producer_ids = iter(range(1, 10**9))
        place = ClientPlace(
            scheduler=self.scheduler,
            network=self.network,
            rng=Random(f"{self.seed}/clients"),
            checkers=self.checkers,
            brokers=self.nodes,
            new_producer_id=lambda: next(producer_ids),
        )
        for number, key in enumerate(self._partitions):
            address = 100 + 10 * number
            self._clients += [
                Producer(address, key, place, acks_all=True),
                Producer(address + 1, key, place, acks_all=True),
                Producer(address + 2, key, place, acks_all=False),
                Reader(address + 3, key, place),
            ]

    # Conditions.

    def _hosted(self) -> list[SimulatedPartition]:
        return [
            partition
            for node in self._nodes.values()
            if node.broker is not None
            for partition in node.broker.partitions.values()
        ]

    def _metadata(self) -> ClusterState:
        return max(
            (node.controller.state for node in self._nodes.values() if node.controller),
            key=lambda state: state.applied_index,
            default=ClusterState(),
        )

    def _all_unfenced(self) -> bool:
        brokers = self._metadata().brokers
        return len(brokers) == len(self.nodes) and all(broker.usable for broker in brokers.values())

    def _all_host(self) -> bool:
        return len(self._hosted()) == 3 * len(self._partitions)

    def _all_in_order(self) -> bool:
        hosted = self._hosted()
        if len(hosted) < 3 * len(self._partitions) or not self._all_unfenced():
            return False
        if any(isinstance(client, Producer) and not client.is_done for client in self._clients):
            return False
        if any(len(part.isr) < 3 for _, part in self._metadata().all_partitions()):
            return False
        ends = {partition.key: self.checkers.log_of(partition.key).end for partition in hosted}
        return all(
            partition.log.log_end_offset
            == partition.replica.high_watermark
            == partition.log.durable_offset
            == ends[partition.key]
            for partition in hosted
        ) and all(
            client.offset == ends[client.key]
            for client in self._clients
            if isinstance(client, Reader)
        )

    def _state(self) -> str:
        parts = [str(part) for _, part in self._metadata().all_partitions()]
        for partition in self._hosted():
            replica, log = partition.replica, partition.log
            parts.append(
                f"{partition.key.partition} on {partition.broker.node_id}: {replica.role.value} "
                f"in epoch {replica.leader_epoch}, {replica.high_watermark} of "
                f"{log.durable_offset}/{log.log_end_offset}, isr {sorted(replica.isr)}"
            )
        unfinished = [
            client.address
            for client in self._clients
            if isinstance(client, Producer) and not client.is_done
        ]
        readers = [
            (client.key.partition, client.offset)
            for client in self._clients
            if isinstance(client, Reader)
        ]
        return "; ".join([*parts, f"producers at work: {unfinished}", f"readers at {readers}"])


def shrink(report: Report, *, runs: int = 200) -> Report:
    """A run of the same seed that fails with fewer faults, if one is found."""
    best = report
    position = 0
    while position < len(best.faults) and runs > 0:
        runs -= 1
        fewer = [fault for at, fault in enumerate(best.faults) if at != position]
        tried = Simulation(report.seed, fewer).run()
        if tried.violation is not None:
            best = tried
        else:
            position += 1
    return best
