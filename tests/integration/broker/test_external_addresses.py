"""Clients inside and outside, each told of addresses that they reach: real nodes and clients.

Nodes serve those outside at 127.0.0.2 alone and all others at 127.0.0.1, on different ports. A
client of either side that connects to an address of the other's fails the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.client import AdminClient, AsyncConsumer, AsyncProducer, TopicPartition
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import groups_pb2, groups_pb2_grpc, metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import ErrorCode
from tests.integration import raw
from tests.integration.cluster import LOCAL_HOSTS, Cluster, open_channel
from tests.integration.ports import free_ports
from tests.support import eventually, wait_until

pytestmark = pytest.mark.integration

INSIDE, OUTSIDE = "127.0.0.1", "127.0.0.2"
TOPIC = "orders"
PATIENCE_S = 60.0
REQUEST_MAX_BYTES = 1024 * 1024
PENSTOCK = (sys.executable, "-m", "penstock.cli")


class TwoSided(Cluster):
    """Three nodes with addresses for both sides."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        super().__init__(
            directory, settings={"request.max.bytes": REQUEST_MAX_BYTES}, authority=authority
        )
        ports = free_ports(2 * len(self.nodes))
        self.external = {
            node: f"{OUTSIDE}:{port}" for node, port in zip(self.nodes, ports, strict=False)
        }
        self.metrics = dict(zip(self.nodes, ports[len(self.nodes) :], strict=True))
        for node in self.nodes.values():
            with node.config.open("a") as config:
                config.write(f'external.listen = "{self.external[node.node_id]}"\n')
                config.write(f'metrics.listen = "{INSIDE}:{self.metrics[node.node_id]}"\n')
            if authority is not None:
                names = (*LOCAL_HOSTS, OUTSIDE)
                issued = issue_node(authority, node.node_id, self.cluster_id, names)
                write_files(node.directory / "tls", "node", authority, issued)

    def addresses(self, side: str) -> dict[int, str]:
        if side == OUTSIDE:
            return self.external
        return {number: node.address for number, node in self.nodes.items()}

    def bootstrap_of(self, side: str) -> str:
        return ",".join(self.addresses(side).values())

    @contextlib.contextmanager
    def channel_of(self, side: str, node: int) -> Iterator[grpc.Channel]:
        with open_channel(self.addresses(side)[node], self.credentials) as channel:
            yield channel


@pytest.fixture(scope="module", params=["plain", "tls"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoSided]:
    authority = Authority() if request.param == "tls" else None
    made = TwoSided(tmp_path_factory.mktemp("cluster"), authority)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(params=[INSIDE, OUTSIDE], ids=["inside", "outside"])
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tls(cluster: TwoSided, tmp_path: Path) -> dict[str, str]:
    """What a client is given under TLS."""
    if cluster.authority is None:
        return {}
    issued = cluster.authority.issue("client", ["client"])
    files = write_files(tmp_path / "client", "client", cluster.authority, issued)
    return {
        "tls_ca": str(files.ca),
        "tls_certificate": str(files.certificate),
        "tls_key": str(files.key),
    }


def make_topic(cluster: TwoSided, name: str, partitions: int = 3) -> None:
    raw.create_topic(cluster, name, partitions)


def told(brokers: Any) -> dict[int, str]:
    return {one.node_id: f"{one.host}:{one.port}" for one in brokers}


def other_than(leader: int) -> int:
    return leader % 3 + 1


def test_every_answer_says_where_the_side_that_asks_reaches_a_broker(
    cluster: TwoSided, side: str
) -> None:
    topic = f"answers-{side.rpartition('.')[2]}"
    make_topic(cluster, topic, partitions=1)
    wait_until(lambda: cluster.topic(topic).partitions[0].leader > 0, "a leader", PATIENCE_S)
    leader = cluster.topic(topic).partitions[0].leader
    addresses = cluster.addresses(side)
    with cluster.channel_of(side, other_than(leader)) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        seen = stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=10)
        assert told(seen.brokers) == addresses
        external = {one.node_id: f"{one.external_host}:{one.external_port}" for one in seen.brokers}
        assert external == cluster.external
        described = stub.DescribeTopics(
            metadata_pb2.DescribeTopicsRequest(topics=[topic]), timeout=10
        )
        assert told(described.brokers) == addresses
        watch = stub.Watch(metadata_pb2.WatchRequest(topics=[topic]), timeout=10)
        assert told(next(iter(watch)).brokers) == addresses
        watch.cancel()
    refused = raw.produce_at(
        addresses[other_than(leader)], topic, raw.batch_of([b"x"]), credentials=cluster.credentials
    )
    assert refused.error.code == ErrorCode.NOT_LEADER
    hint = refused.error.current_leader
    assert (hint.node_id, f"{hint.host}:{hint.port}") == (leader, addresses[leader])


def test_coordinators_are_told_of_likewise(cluster: TwoSided, side: str) -> None:
    group = "readers"
    request = metadata_pb2.FindCoordinatorRequest(
        key=group, type=metadata_pb2.COORDINATOR_TYPE_GROUP
    )
    addresses = cluster.addresses(side)

    def find() -> metadata_pb2.FindCoordinatorResponse:
        with cluster.channel_of(side, 1) as channel:
            return metadata_pb2_grpc.MetadataStub(channel).FindCoordinator(request, timeout=10)

    wait_until(lambda: not find().HasField("error"), "a coordinator", PATIENCE_S)
    found = find().coordinator
    assert f"{found.host}:{found.port}" == addresses[found.node_id]
    with cluster.channel_of(side, other_than(found.node_id)) as channel:
        refused = groups_pb2_grpc.GroupsStub(channel).FetchOffsets(
            groups_pb2.FetchOffsetsRequest(group_id=group), timeout=10
        )
    assert refused.error.code == ErrorCode.NOT_COORDINATOR
    hint = refused.error.current_leader
    assert f"{hint.host}:{hint.port}" == addresses[hint.node_id]
    assert "127.0.0." not in refused.error.message


def services(cluster: TwoSided, side: str) -> set[str]:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with cluster.channel_of(side, 1) as channel:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([asked]), timeout=10
        )
        return {one.name for one in next(answers).list_services_response.service}


def test_what_is_for_nodes_is_not_served_outside(cluster: TwoSided) -> None:
    inside, outside = services(cluster, INSIDE), services(cluster, OUTSIDE)
    nodes_only = {"penstock.v1.Replication", "penstock.v1.Coordination"}
    assert inside - outside == nodes_only
    assert {"penstock.v1.Log", "penstock.v1.Admin", "grpc.health.v1.Health"} <= outside
    with cluster.channel_of(OUTSIDE, 1) as channel:
        locate = channel.unary_unary("/penstock.v1.Replication/Locate")  # type: ignore[call-arg]
        with pytest.raises(grpc.RpcError) as refused:
            locate(b"", timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_limits_are_those_inside(cluster: TwoSided, side: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        raw.produce_at(
            cluster.addresses(side)[1],
            TOPIC,
            raw.batch_of([bytes(REQUEST_MAX_BYTES)]),
            credentials=cluster.credentials,
        )
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_connections_are_counted_by_side(cluster: TwoSided) -> None:
    """In order: the client's own connection is there when the metrics are read."""

    def count(listener: str) -> float:
        url = f"http://{INSIDE}:{cluster.metrics[1]}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
        name = re.escape(f'penstock_connections{{listener="{listener}"}}')
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, listener
        return float(found[1])

    wait_until(lambda: count("external") == 0, "clients of other tests are gone", PATIENCE_S)
    with cluster.channel_of(OUTSIDE, 1) as channel:
        grpc.channel_ready_future(channel).result(10)
        assert count("external") == 1


def test_the_doctor_asks_brokers_where_its_side_reaches_them(
    cluster: TwoSided, side: str, tls: dict[str, str]
) -> None:
    options = {"tls_ca": "--tls-ca", "tls_certificate": "--tls-cert", "tls_key": "--tls-key"}
    given = [part for key, path in tls.items() for part in (options[key], path)]
    done = subprocess.run(
        [*PENSTOCK, "doctor", "-b", cluster.addresses(side)[2], "--output", "json", *given],
        capture_output=True,
        text=True,
        check=False,
    )
    seen = json.loads(done.stdout)
    asked = {one["node_id"]: one["address"] for one in seen["nodes"]}
    assert asked == cluster.addresses(side), done.stderr
    assert all(one["node"] is not None for one in seen["nodes"]), "they answered there"
    assert not [one for one in seen["findings"] if "advertised" in one["next"]]


# ------------------------------------------------------------------- whole clients, a leader moves

_may_reach: ContextVar[str] = ContextVar("_may_reach")


@dataclass
class Fence:
    """Where clients connected to, and where they should not have."""

    reached: set[str] = field(default_factory=set)
    trespassed: list[str] = field(default_factory=list)

    def around(self, opens: Callable[..., Any]) -> Callable[..., Any]:
        def open_it(address: str, *args: Any, **kwargs: Any) -> Any:
            self.reached.add(address)
            if not address.startswith(f"{_may_reach.get()}:"):
                self.trespassed.append(address)
            return opens(address, *args, **kwargs)

        return open_it


@pytest.fixture
def fence(monkeypatch: pytest.MonkeyPatch) -> Fence:
    made = Fence()
    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, name, made.around(getattr(grpc.aio, name)))
    return made


class OneSide:
    """A producer and a member of a group, on one side; both go on until they are told to end."""

    def __init__(self, cluster: TwoSided, side: str, topic: str, tls: dict[str, Any]) -> None:
        self.bootstrap = cluster.bootstrap_of(side)
        self.side = side
        self._topic = topic
        self._tls = tls
        self.sent = 0
        self.read: set[bytes] = set()
        self._ends = asyncio.Event()

    def start(self) -> list[asyncio.Task[None]]:
        _may_reach.set(self.side)  # Of these tasks, and those that clients begin in them.
        return [asyncio.create_task(self._produce()), asyncio.create_task(self._consume())]

    def end(self) -> None:
        self._ends.set()

    async def _produce(self) -> None:
        async with AsyncProducer(self.bootstrap, **self._tls) as producer:
            while not self._ends.is_set():
                value = b"%s %d" % (self.side.encode(), self.sent)
                await producer.send_and_wait(self._topic, value, key=value)
                self.sent += 1

    async def _consume(self) -> None:
        async with AsyncConsumer(
            self.bootstrap,
            group_id=f"group-{self.side}",
            topics=self._topic,
            auto_offset_reset="earliest",
            **self._tls,
        ) as consumer:
            while not self._ends.is_set():
                for record in await consumer.poll(100):
                    self.read.add(record.value)
            await consumer.commit()


@contextlib.asynccontextmanager
async def both_sides(
    cluster: TwoSided, topic: str, tls: dict[str, Any]
) -> AsyncIterator[list[OneSide]]:
    sides = [OneSide(cluster, side, topic, tls) for side in (INSIDE, OUTSIDE)]
    tasks = [task for side in sides for task in side.start()]
    try:
        yield sides
        for side in sides:
            side.end()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def go_on(sides: list[OneSide], fence: Fence) -> None:
    """Until each has written twenty more, and read all that was written till then."""
    goals = [side.sent + 20 for side in sides]

    async def until(condition: Callable[[], bool]) -> None:
        await eventually(lambda: bool(fence.trespassed) or condition(), PATIENCE_S)
        assert fence.trespassed == [], "an address of the other side"

    await until(lambda: all(one.sent >= goal for one, goal in zip(sides, goals, strict=True)))
    written = {
        b"%s %d" % (one.side.encode(), number) for one in sides for number in range(one.sent)
    }
    await until(lambda: all(written <= one.read for one in sides))


async def test_both_sides_write_and_read_while_leaders_move(
    cluster: TwoSided, tls: dict[str, Any], fence: Fence
) -> None:
    make_topic(cluster, TOPIC)
    partitions = [TopicPartition(TOPIC, number) for number in range(3)]

    def leaders() -> list[int]:
        return [one.leader for one in cluster.topic(TOPIC).partitions]

    def drain(node: int, *, undo: bool = False) -> None:
        with AdminClient(cluster.bootstrap, **tls) as admin:
            admin.drain_broker(node, undo=undo)
            if undo:
                admin.elect_leaders(partitions)

    async with both_sides(cluster, TOPIC, tls) as sides:
        await go_on(sides, fence)
        _may_reach.set(INSIDE)  # The admin clients of this task.
        for node in (1, 2):
            assert node in leaders(), "something has to move"
            await asyncio.to_thread(drain, node)
            await asyncio.to_thread(wait_until, lambda: node not in leaders(), "moved", PATIENCE_S)  # noqa: B023 - waited for here.
            await go_on(sides, fence)
            await asyncio.to_thread(drain, node, undo=True)
            await go_on(sides, fence)
    hosts = {address.partition(":")[0] for address in fence.reached}
    assert hosts == {INSIDE, OUTSIDE}
    assert set(cluster.external.values()) <= fence.reached, "it was led on every broker"


# ----------------------------------------------------------------------------------- the upgrade


def test_once_the_level_is_raised_clients_are_told_without_a_restart(tmp_path: Path) -> None:
    """The level is raised from 6, and nobody is restarted for it.

    The former software is today's that knows no level above 6 (run_level_6): it stands for what is
    in force, and not for what the software of then did. That is run by operating/test_upgrade.py.
    """
    cluster = TwoSided(tmp_path)

    def upgrade() -> dict[str, int]:
        done = subprocess.run(
            [*PENSTOCK, "cluster", "upgrade", "-b", cluster.bootstrap, "--output", "json"],
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(json.loads(done.stdout))

    def seen_outside() -> dict[int, str]:
        with cluster.channel_of(OUTSIDE, 2) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            answer = stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=10)
        return told(answer.brokers)

    try:
        for node in cluster.nodes.values():
            node.module = "tests.integration.broker.run_level_6"
        cluster.start()
        for node in cluster.nodes.values():
            node.stop()
            node.module = "penstock.broker"
            cluster.start()
        assert seen_outside() == cluster.addresses(INSIDE), "as at the level that is in force"
        for node in cluster.nodes.values():
            assert "penstock cluster upgrade" in node.log.read_text()
        epochs = {one.node_id: one.broker_epoch for one in cluster.describe(1).brokers}  # type: ignore[union-attr]  # It answers.
        assert upgrade() == {"metadata_version": METADATA_VERSION, "before": 6}
        wait_until(lambda: seen_outside() == cluster.external, "told of them", PATIENCE_S)
        after = cluster.describe(1)
        assert after is not None
        assert {one.node_id: one.broker_epoch for one in after.brokers} == epochs
        assert told(after.brokers) == cluster.addresses(INSIDE)
    finally:
        cluster.close()
