"""Histories of the metadata: what may happen to a cluster, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.model import NO_LEADER
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, Driver, incarnation, topic_id

Step = Callable[[Driver], Any]
History = list[Step]

nodes = st.integers(1, 4)
topics = st.integers(1, 3)
versions = st.sampled_from([METADATA_VERSION, METADATA_VERSION, 1])
chance = st.integers(0, 9).map(lambda number: number == 0)


def records(delta: cluster_pb2.MetadataDelta) -> tuple[Any, ...]:
    """What a delta or a snapshot says, without its index."""
    return (
        delta.controller_epoch,
        delta.controller_id,
        delta.cluster_id,
        delta.metadata_version,
        dict(delta.cluster_configs.configs),
        sorted(broker.SerializeToString() for broker in delta.brokers),
        sorted(topic.SerializeToString(deterministic=True) for topic in delta.topics),
        sorted(part.SerializeToString() for part in delta.partitions),
    )


def configs(draw: st.DrawFn) -> dict[str, str]:
    chosen: dict[str, str] = {}
    if draw(st.booleans()):
        chosen["min.insync.replicas"] = str(draw(st.integers(1, 4)))
    if draw(chance):
        chosen["unclean.leader.election.enable"] = draw(st.sampled_from(["true", "false"]))
    if draw(chance):
        chosen["retention.ms"] = draw(st.sampled_from(["1", "soon"]))
    return chosen


def assignments(draw: st.DrawFn) -> list[cluster_pb2.ReplicaAssignment]:
    size = draw(st.integers(1, 4))
    lists = draw(st.lists(st.permutations([1, 2, 3, 4]), min_size=1, max_size=3))
    return [cluster_pb2.ReplicaAssignment(replicas=nodes[:size]) for nodes in lists]


def present(driver: Driver, number: int) -> int:
    """What the id of ``topic-{number}`` is made of: a topic that is made anew has another one."""
    topic = driver.state.topic(f"topic-{number}")
    return number if topic is None else int.from_bytes(topic.topic_id, "big")


@st.composite
def steps(draw: st.DrawFn) -> Any:
    """One thing that happens, as a function of the driver that it happens to."""
    kind = draw(st.sampled_from(sorted(STEPS)))
    return STEPS[kind](draw)


def register(draw: st.DrawFn) -> Any:
    node, life, clean = draw(nodes), draw(st.integers(1, 5)), draw(st.booleans())
    supported = 1 if draw(chance) else draw(st.sampled_from([0, METADATA_VERSION]))
    external = draw(st.sampled_from([("", 0), ("outside", 9094), ("", 1), ("outside", 0)]))

    def step(driver: Driver) -> None:
        known = driver.state.brokers.get(node)
        before = dict(driver.state.all_partitions())
        body = cluster_pb2.RegisterBrokerCommand(
            node_id=node,
            incarnation_id=incarnation(node * 10 + life),
            cluster_id=CLUSTER,
            host="h",
            port=1,
            previous_broker_epoch=known.broker_epoch if known and clean else -1,
            supported_metadata_version=supported,
            external_host=external[0],
            external_port=external[1],
        )
        result = driver.run(register_broker=body)
        if result.register_broker.broker_epoch != driver.index or (known and clean):
            return
        for key, now in driver.state.all_partitions():
            if {*before[key].isr, *before[key].elr} - {node}:
                assert node not in (*now.isr, *now.elr), "another surely lost nothing"

    return step


def about_broker(kind: str, body: Any) -> Any:
    def make(draw: st.DrawFn) -> Any:
        node, stale = draw(nodes), draw(chance)

        def step(driver: Driver) -> None:
            known = driver.state.brokers.get(node)
            epoch = known.broker_epoch if known and not stale else 1
            driver.run(**{kind: body(node_id=node, broker_epoch=epoch)})

        return step

    return make


def unregister(draw: st.DrawFn) -> Any:
    body = cluster_pb2.UnregisterBrokerCommand(node_id=draw(nodes))
    return lambda driver: driver.run(unregister_broker=body)


def create(draw: st.DrawFn) -> Any:
    body = cluster_pb2.CreateTopicCommand(
        name=f"topic-{draw(topics)}",
        topic_id=topic_id(draw(st.integers(1, 9))),
        configs=configs(draw),
        validate_only=draw(chance),
    )
    if draw(st.booleans()):
        body.replica_assignments.extend(assignments(draw))
    else:
        body.partition_count = draw(st.integers(0, 4))
        body.replication_factor = draw(st.integers(1, 3))
    return lambda driver: driver.run(create_topic=body)


def delete(draw: st.DrawFn) -> Any:
    body = cluster_pb2.DeleteTopicCommand(name=f"topic-{draw(topics)}")
    return lambda driver: driver.run(delete_topic=body)


def grow(draw: st.DrawFn) -> Any:
    body = cluster_pb2.CreatePartitionsCommand(
        topic=f"topic-{draw(topics)}", total_count=draw(st.integers(1, 5))
    )
    return lambda driver: driver.run(create_partitions=body)


def alter_configs(draw: st.DrawFn) -> Any:
    body = cluster_pb2.AlterTopicConfigsCommand(
        topic=f"topic-{draw(topics)}",
        set=configs(draw),
        remove=draw(st.lists(st.sampled_from(["min.insync.replicas", "nonsense"]), max_size=1)),
    )
    return lambda driver: driver.run(alter_topic_configs=body)


def alter_partition(draw: st.DrawFn) -> Any:
    topic, number = draw(topics), draw(st.integers(0, 3))
    isr = draw(st.lists(nodes, unique=True, max_size=4))
    by_another, stale = draw(chance), draw(st.sampled_from([0, 0, 0, 0, 1, -1]))

    def step(driver: Driver) -> None:
        drawn = present(driver, topic)
        now = driver.state.partition(topic_id(drawn), number)
        if now is None:
            return
        leader = 1 if by_another or now.leader == NO_LEADER else now.leader
        if leader in driver.state.brokers:
            members = list(dict.fromkeys([leader, *isr]))
            driver.alter(
                [node for node in members if node in now.replicas],
                node=leader,
                topic=drawn,
                number=number,
                partition_epoch=now.partition_epoch + stale,
            )

    return step


def move(draw: st.DrawFn) -> Any:
    numbers = draw(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True))
    moves = [(draw(topics), n, draw(st.lists(nodes, unique=True, max_size=4))) for n in numbers]
    validate_only = draw(chance)

    def step(driver: Driver) -> None:
        body = cluster_pb2.AlterReassignmentsCommand(validate_only=validate_only)
        for topic, number, target in moves:
            chosen = topic_id(present(driver, topic))
            body.partitions.add(topic_id=chosen, partition=number, replicas=target)
        driver.run(alter_reassignments=body)

    return step


def configure(draw: st.DrawFn) -> Any:
    keys = st.sampled_from(["replica.lag.time.max.ms", "leader.imbalance.enable", "nonsense"])
    body = cluster_pb2.AlterClusterConfigsCommand(
        set=draw(st.dictionaries(keys, st.sampled_from(["true", "100", "-1"]), max_size=2)),
        remove=draw(st.lists(keys, max_size=1)),
        validate_only=draw(chance),
    )
    return lambda driver: driver.run(alter_cluster_configs=body)


def upgrade(draw: st.DrawFn) -> Any:
    body = cluster_pb2.RaiseMetadataVersionCommand(
        metadata_version=draw(st.integers(0, METADATA_VERSION)),
        controller_supports=METADATA_VERSION,
    )
    return lambda driver: driver.run(raise_metadata_version=body)


def elect(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from([0, 1, 1, 2]))
    numbers = draw(st.lists(st.tuples(topics, st.integers(0, 3)), max_size=3))

    def step(driver: Driver) -> None:
        body = cluster_pb2.ElectLeadersCommand(type=kind)  # type: ignore[arg-type]
        for topic, number in numbers:
            body.partitions.add(topic_id=topic_id(present(driver, topic)), partition=number)
        driver.run(elect_leaders=body)

    return step


def claim(draw: st.DrawFn) -> Any:
    step_up, node = draw(st.integers(-1, 2)), draw(nodes)
    cluster_id = draw(st.sampled_from([CLUSTER, CLUSTER, "other", ""]))
    return lambda driver: driver.claim(driver.epoch + step_up, node, cluster_id)


def junk(draw: st.DrawFn) -> Any:
    payload = draw(st.binary(max_size=40))
    return lambda driver: driver.apply_bytes(payload)


def stale(draw: st.DrawFn) -> Any:
    """An entry from the past once more, with or without another epoch or sequence."""
    pick, epoch, sequence = draw(st.integers(0, 50)), draw(st.integers(-1, 1)), draw(st.booleans())

    def step(driver: Driver) -> None:
        _, payload = driver.log[pick % len(driver.log)]
        before = records(driver.state.metadata())
        command = cluster_pb2.Command()
        try:
            command.ParseFromString(payload)
        except DecodeError:
            driver.apply_bytes(payload)
            return
        if epoch == 0 and sequence:
            command.controller_epoch = driver.epoch
            command.sequence = driver.sequence
        applied = driver.apply_bytes(command.SerializeToString())
        if command.sequence <= driver.sequence or command.controller_epoch < driver.epoch:
            assert applied.result.HasField("error")
            assert records(driver.state.metadata()) == before

    return step


def report(draw: st.DrawFn) -> Any:
    node, number, by_stale = draw(nodes), draw(topics), draw(chance)
    reports = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3))
    if draw(chance):
        reports.append((0, draw(st.integers(0, 4))))

    def step(driver: Driver) -> None:
        known = driver.state.brokers.get(node)
        epoch = known.broker_epoch if known and not by_stale else 1
        body = cluster_pb2.ReportReplicasCommand(node_id=node, broker_epoch=epoch)
        for partition, state in reports:
            body.replicas.add(
                topic_id=topic_id(present(driver, number)),
                partition=partition,
                state=state,  # type: ignore[arg-type]
            )
        driver.run(report_replicas=body)

    return step


def drain(draw: st.DrawFn) -> Any:
    body = cluster_pb2.DrainBrokerCommand(
        node_id=draw(nodes), since_ms=draw(st.sampled_from([0, 1, 1, 2, -1]))
    )

    def step(driver: Driver) -> None:
        before = dict(driver.state.all_partitions())
        result = driver.run(drain_broker=body)
        now = dict(driver.state.all_partitions())
        for key, partition in now.items():
            assert partition.isr == before[key].isr, "nobody leaves the in-sync set"
        if not result.HasField("error"):
            led = sum(partition.leader == body.node_id for partition in now.values())
            assert result.drain_broker.remaining_leaderships == led

    return step


def restart_controller(draw: st.DrawFn) -> Any:
    def step(driver: Driver) -> None:
        driver.restored = ClusterState.restore(driver.state.snapshot())

    return step


STEPS: dict[str, Any] = {
    "alter configs": alter_configs,
    "alter partition": alter_partition,
    "alter partition again": alter_partition,
    "alter partition once more": alter_partition,
    "claim": claim,
    "configure": configure,
    "create": create,
    "delete": delete,
    "drain": drain,
    "drain again": drain,
    "elect": elect,
    "fence": about_broker("fence_broker", cluster_pb2.FenceBrokerCommand),
    "fence again": about_broker("fence_broker", cluster_pb2.FenceBrokerCommand),
    "grow": grow,
    "junk": junk,
    "move": move,
    "move again": move,
    "producer ids": about_broker("allocate_producer_ids", cluster_pb2.AllocateProducerIdsCommand),
    "register": register,
    "report": report,
    "report again": report,
    "restart controller": restart_controller,
    "shut down": about_broker("controlled_shutdown", cluster_pb2.ControlledShutdownCommand),
    "stale": stale,
    "unfence": about_broker("unfence_broker", cluster_pb2.UnfenceBrokerCommand),
    "unfence again": about_broker("unfence_broker", cluster_pb2.UnfenceBrokerCommand),
    "unregister": unregister,
    "upgrade": upgrade,
}


def histories() -> st.SearchStrategy[History]:
    """Short ones and long ones."""
    return st.one_of(st.lists(steps(), max_size=20), st.lists(steps(), min_size=25, max_size=60))


def play(history: History, driver: Driver) -> None:
    """Let it happen, most of the time to a cluster that works already."""
    if len(history) % 4:
        for node in (1, 2, 3, 4):
            driver.start(node)
        driver.create("topic-1", assignments=[[1, 2, 3], [2, 3, 4]])
    for step in history:
        step(driver)
