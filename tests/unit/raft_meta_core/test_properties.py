"""Whatever is in the Raft log: every controller gets the same valid state, and brokers see it."""

from __future__ import annotations

import contextlib
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.core.metadata_image import MetadataImage
from penstock.raft_meta.core.cluster_state import Applied, ClusterState
from penstock.raft_meta.core.model import NO_LEADER, Partition
from penstock.raft_meta.core.versions import METADATA_VERSION, SoftwareTooOldError
from penstock.v1 import cluster_pb2
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, Driver, incarnation, topic_id

nodes = st.integers(1, 4)
topics = st.integers(1, 3)
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


def seen_by_brokers(image: MetadataImage) -> tuple[Any, ...]:
    whole = cluster_pb2.MetadataDelta(
        controller_epoch=max(image.controller_epoch, 0),
        controller_id=image.controller_id,
        cluster_id=image.cluster_id,
        metadata_version=image.metadata_version,
        cluster_configs=cluster_pb2.ClusterConfigRecord(configs=image.cluster_configs),
        brokers=image.brokers.values(),
        topics=[topic.record for topic in image.topics()],
        partitions=[part for topic in image.topics() for part in topic.partitions.values()],
    )
    return records(whole)


class Checked(Driver):
    """A driver that checks every promise after every entry, with a controller restored anew."""

    def __init__(self, metadata_version: int = METADATA_VERSION) -> None:
        self.restored: ClusterState | None = None
        self.produced_ids: set[int] = set()
        super().__init__(metadata_version=metadata_version)

    def apply_bytes(self, payload: bytes) -> Applied:
        before = dict(self.state.all_partitions())
        claimed = self.state.controller_epoch
        old = self.state.metadata()
        frozen, old_snapshot = self.state.frozen(), self.state.snapshot()
        applied = super().apply_bytes(payload)
        assert frozen.snapshot() == old_snapshot, "what is frozen does not change"
        self.state.validate()
        snapshot = self.state.snapshot()
        if self.restored is not None:
            twin = self.restored.apply(self.index, payload)
            assert twin.result == applied.result
            assert twin.delta == applied.delta
            assert self.restored.snapshot() == snapshot
        assert ClusterState.restore(snapshot).snapshot() == snapshot
        assert seen_by_brokers(self.image) == records(self.state.metadata())
        if applied.delta is None:
            assert records(old) == records(self.state.metadata())
        if applied.result.HasField("error"):
            assert applied.delta is None
        assert self.state.controller_epoch >= claimed
        for key, now in self.state.all_partitions():
            if key in before:
                check_step(before[key], now, applied.result.HasField("alter_reassignments"))
        if applied.result.HasField("allocate_producer_ids"):
            block = applied.result.allocate_producer_ids
            ids = range(block.first_producer_id, block.first_producer_id + block.count)
            assert self.produced_ids.isdisjoint(ids)
            self.produced_ids.update(ids)
        return applied


def check_step(before: Partition, now: Partition, asked: bool) -> None:
    """``asked``: the command was one that moves partitions."""
    if not asked:
        assert now.replicas in (before.replicas, before.target), "moved by nobody's wish"
    assert (now == before) == (now.partition_epoch == before.partition_epoch)
    assert now.partition_epoch - before.partition_epoch in (0, 1)
    left = not set(before.replicas) <= set(now.replicas)
    assert now.leader_epoch - before.leader_epoch == (left or now.leader != before.leader)
    arrived = bool(before.target) and not now.target and now.replicas == before.target
    if arrived:
        assert set(before.adding) <= set(now.isr), "left before the others had come"
    elif left and now.target:
        assert set(before.replicas) - set(now.replicas) <= set(before.adding), "left for nothing"
    # Whoever has arrived may have come in sync with this very change.
    if now.leader not in (NO_LEADER, before.leader) and not now.recovering and not arrived:
        assert now.leader in (*before.isr, *before.elr), "it may lack what was acknowledged"


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


@st.composite
def steps(draw: st.DrawFn) -> Any:
    """One thing that happens, as a function of the driver that it happens to."""
    kind = draw(st.sampled_from(sorted(STEPS)))
    return STEPS[kind](draw)


def register(draw: st.DrawFn) -> Any:
    node, life, clean = draw(nodes), draw(st.integers(1, 5)), draw(st.booleans())
    supported = 1 if draw(chance) else draw(st.sampled_from([0, METADATA_VERSION]))

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
    number = draw(topics)
    body = cluster_pb2.CreateTopicCommand(
        name=f"topic-{draw(topics)}",
        topic_id=topic_id(number),
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
        now = driver.state.partition(topic_id(topic), number)
        if now is None:
            return
        leader = 1 if by_another or now.leader == NO_LEADER else now.leader
        if leader in driver.state.brokers:
            members = list(dict.fromkeys([leader, *isr]))
            driver.alter(
                [node for node in members if node in now.replicas],
                node=leader,
                topic=topic,
                number=number,
                partition_epoch=now.partition_epoch + stale,
            )

    return step


def move(draw: st.DrawFn) -> Any:
    body = cluster_pb2.AlterReassignmentsCommand(validate_only=draw(chance))
    for number in draw(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)):
        target = draw(st.lists(nodes, unique=True, max_size=4))
        body.partitions.add(topic_id=topic_id(draw(topics)), partition=number, replicas=target)
    return lambda driver: driver.run(alter_reassignments=body)


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
    body = cluster_pb2.ElectLeadersCommand(type=draw(st.sampled_from([0, 1, 1, 2])))  # type: ignore[arg-type]
    for number in draw(st.lists(st.integers(0, 3), max_size=3)):
        body.partitions.add(topic_id=topic_id(draw(topics)), partition=number)
    return lambda driver: driver.run(elect_leaders=body)


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


def restart_controller(draw: st.DrawFn) -> Any:
    def step(driver: Checked) -> None:
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
    "elect": elect,
    "fence": about_broker("fence_broker", cluster_pb2.FenceBrokerCommand),
    "fence again": about_broker("fence_broker", cluster_pb2.FenceBrokerCommand),
    "grow": grow,
    "junk": junk,
    "move": move,
    "move again": move,
    "producer ids": about_broker("allocate_producer_ids", cluster_pb2.AllocateProducerIdsCommand),
    "register": register,
    "restart controller": restart_controller,
    "shut down": about_broker("controlled_shutdown", cluster_pb2.ControlledShutdownCommand),
    "stale": stale,
    "unfence": about_broker("unfence_broker", cluster_pb2.UnfenceBrokerCommand),
    "unfence again": about_broker("unfence_broker", cluster_pb2.UnfenceBrokerCommand),
    "unregister": unregister,
    "upgrade": upgrade,
}


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(st.lists(steps(), max_size=20), st.lists(steps(), min_size=25, max_size=60)),
    st.sampled_from([METADATA_VERSION, METADATA_VERSION, 1]),
)
def test_every_history_keeps_every_promise(history: list[Any], metadata_version: int) -> None:
    driver = Checked(metadata_version)
    if len(history) % 4:
        for node in (1, 2, 3, 4):
            driver.start(node)
        driver.create("topic-1", assignments=[[1, 2, 3], [2, 3, 4]])
    for step in history:
        step(driver)
    again = ClusterState()
    for index, payload in driver.log:
        again.apply(index, payload)
    assert again.snapshot() == driver.state.snapshot()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_taken(payloads: list[bytes]) -> None:
    driver = Driver(brokers=2)
    for payload in payloads:
        driver.apply_bytes(payload)
        driver.state.validate()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_well_formed_commands_with_any_values_are_taken(data: st.DataObject) -> None:
    driver = Checked()
    driver.start(1)
    driver.create("topic-1", assignments=[[1]])
    command = data.draw(messages(cluster_pb2.Command))
    command.controller_epoch = driver.epoch
    command.sequence = driver.sequence + 1
    # The one thing that may end the process: a level that this software does not know.
    with contextlib.suppress(SoftwareTooOldError):
        driver.apply_bytes(command.SerializeToString())


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Any message of the kind: every field with small, huge, negative and near-valid values."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message = kind()
        fields = list(kind.DESCRIPTOR.fields)
        oneof = kind.DESCRIPTOR.oneofs_by_name.get("body")
        if oneof is not None:
            fields = [draw(st.sampled_from(list(oneof.fields)))]
        for field in fields:
            if draw(st.booleans()) and oneof is None:
                continue
            fill(draw, message, field)
        return message

    return build()


TEXTS = st.sampled_from(["", "topic-1", "other", CLUSTER, "retention.ms", "1", "-1", "1e9", "\0"])
BYTES = st.sampled_from([b"", topic_id(1), topic_id(2), bytes(16), b"x", incarnation(1001)])


def scalar(draw: st.DrawFn, field: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return draw(TEXTS)
    if field.type == field.TYPE_BYTES:
        return draw(BYTES)
    if field.type == field.TYPE_BOOL:
        return draw(st.booleans())
    bits = 63 if field.type == field.TYPE_INT64 else 31
    return draw(st.one_of(st.integers(-1, 4), st.sampled_from([2**bits - 1, -(2**bits)])))


def fill(draw: st.DrawFn, message: Any, field: Any) -> None:
    repeated = field.label == field.LABEL_REPEATED
    if field.message_type is None:
        if repeated:
            getattr(message, field.name).extend(
                scalar(draw, field) for _ in range(draw(st.integers(0, 3)))
            )
        else:
            setattr(message, field.name, scalar(draw, field))
    elif field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[draw(TEXTS)] = draw(TEXTS)
    else:
        kind = field.message_type._concrete_class
        if repeated:
            for _ in range(draw(st.integers(0, 2))):
                getattr(message, field.name).append(draw(messages(kind)))
        else:
            getattr(message, field.name).CopyFrom(draw(messages(kind)))
            getattr(message, field.name).SetInParent()
