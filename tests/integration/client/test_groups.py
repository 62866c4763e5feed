"""Consumer groups over real nodes, with the sync and with the asyncio consumer."""

from __future__ import annotations

import re
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    AsyncConsumer,
    Consumer,
    GroupSubscribedToTopicError,
    MaxPollExceededError,
    OffsetAndMetadata,
    Producer,
    TopicPartition,
)
from penstock.client.descriptions import GroupDescription, MemberDescription
from penstock.v1 import common_pb2, groups_pb2, groups_pb2_grpc
from penstock.wire.errors import ErrorCode
from tests.integration.client.group_members import KINDS, GroupMember, Kind
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration

RACKS = {1: "east", 2: "west", 3: "north"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    metrics = free_ports(len(made.nodes))
    for (node_id, node), port in zip(made.nodes.items(), metrics, strict=True):
        with node.config.open("a", encoding="utf-8") as config:
            config.write(f'node.rack = "{RACKS[node_id]}"\n')
            config.write(f'metrics.listen = "127.0.0.1:{port}"\n')
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


@pytest.fixture(scope="module")
def producer(cluster: Cluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap) as client:
        yield client


@pytest.fixture(params=KINDS, ids=["sync", "asyncio"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for the test's topic and group that no other test uses."""
    return re.sub(r"[^a-z]+", "-", request.node.name.lower()).strip("-")


Join = Callable[..., GroupMember]


@pytest.fixture
def join(cluster: Cluster, kind: Kind, name: str) -> Iterator[Join]:
    """Start members; they are stopped in the end."""
    with ExitStack() as members:

        def start(topics: Any = name, **settings: Any) -> GroupMember:
            settings = {"group_id": name, **settings}
            member = GroupMember(kind, cluster.bootstrap, topics, **settings)
            members.callback(member.stop)
            return member

        yield start


def described(admin: AdminClient, group: str) -> GroupDescription:
    [found] = admin.describe_groups([group])
    return found


def by_client(admin: AdminClient, group: str) -> dict[str, MemberDescription]:
    return {member.client_id: member for member in described(admin, group).members}


def is_stable(admin: AdminClient, group: str, members: int) -> bool:
    if group not in {listing.group_id for listing in admin.list_groups()}:
        return False
    found = described(admin, group)
    return found.state == "stable" and len(found.members) == members


def shared(*members: GroupMember) -> list[int]:
    return sorted(len(member.owned) for member in members)


def write(producer: Producer, topic: str, partitions: int, values: range) -> None:
    for number in values:
        producer.send(topic, b"%d" % number, partition=number % partitions)
    producer.flush()


def test_only_what_moves_stops_when_a_member_joins(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 6)
    a, b = join(), join()
    wait_until(lambda: shared(a, b) == [3, 3], "a fair share")
    before = a.numbers, b.numbers
    for member in (a, b):
        member.listener.heard.clear()
    # While a is slow to give its part back, b and the new one go on.
    a.listener.may_give_back.clear()
    c = join()
    wait_until(lambda: a.listener.of("revoked") != set(), "a is asked to give a partition back")
    wait_until(lambda: len(c.owned) == 1, "the new member has what b gave back")
    moved = a.listener.of("revoked")
    write(producer, name, 6, range(60))
    readable = {b"%d" % number for number in range(60) if number % 6 not in before[0]}
    wait_until(lambda: {*b.values, *c.values} >= readable, "what b and c hold is read meanwhile")
    a.listener.may_give_back.set()
    wait_until(lambda: shared(a, b, c) == [2, 2, 2], "a fair share for three")
    assert len(moved) == 1
    assert a.numbers == before[0] - moved
    assert a.listener.of("revoked") == moved
    assert len(b.listener.of("revoked")) == 1
    assert a.listener.of("lost") == b.listener.of("lost") == set()
    wanted = {b"%d" % number for number in range(60)}
    wait_until(lambda: {*a.values, *b.values, *c.values} == wanted, "all is read")


def test_a_member_that_leaves_stops_nobody_else(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 6)
    a, b, c = join(), join(), join()
    wait_until(lambda: shared(a, b, c) == [2, 2, 2], "a fair share")
    kept = a.numbers, b.numbers
    revoked = [member.listener.of("revoked") for member in (a, b)]
    write(producer, name, 6, range(60))
    c.stop()
    wait_until(lambda: shared(a, b) == [3, 3], "its part is taken over")
    assert kept[0] < a.numbers
    assert kept[1] < b.numbers
    assert [member.listener.of("revoked") for member in (a, b)] == revoked
    wait_until(lambda: len(a.values + b.values + c.values) == 60, "all is read")
    assert set((a.values + b.values + c.values).values()) == {1}, "and once: c committed"


def test_a_static_member_restarts_without_moving_anything(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 4)
    a = join(client_id="a")
    b = join(client_id="b", group_instance_id="the-static-one")
    wait_until(lambda: shared(a, b) == [2, 2], "a fair share")
    wait_until(lambda: is_stable(admin, name, 2), "the group is stable")
    heard, epoch = list(a.listener.heard), described(admin, name).group_epoch
    had = b.numbers
    b.stop()
    wait_until(lambda: by_client(admin, name)["b"].state == "away", "b is away")
    write(producer, name, 4, range(40))
    again = join(client_id="b", group_instance_id="the-static-one")
    wait_until(lambda: again.numbers == had, "it has its partitions again")
    wait_until(lambda: len(a.values + again.values) == 40, "all is read")
    assert a.listener.heard == heard
    assert described(admin, name).group_epoch == epoch


def test_members_beyond_the_partitions_stand_by_and_take_over_at_once(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 2)
    members = {client: join(client_id=client) for client in ("a", "b", "c")}
    wait_until(lambda: is_stable(admin, name, 3), "the group is stable")
    states = {client: member.state for client, member in by_client(admin, name).items()}
    assert sorted(states.values()) == ["stable", "stable", "standby"]
    idle = next(client for client, state in states.items() if state == "standby")
    working = next(client for client, state in states.items() if state == "stable")
    wait_until(lambda: len(members[working].numbers) == 1, "it has heard what it keeps")
    taken = members[working].numbers
    members[working].stop()
    wait_until(lambda: members[idle].numbers == taken, "the one that stood by takes over", 30)
    write(producer, name, 2, range(10))
    left = [member for client, member in members.items() if client != working]
    wait_until(lambda: len(left[0].values + left[1].values) == 10, "all is read")


@pytest.mark.parametrize(
    ("assignor", "expected"),
    [
        ("range", [{0, 1}, {2, 3}]),
        ("roundrobin", [{0, 2}, {1, 3}]),
    ],
)
def test_assignors(
    admin: AdminClient, join: Join, name: str, assignor: str, expected: list[set[int]]
) -> None:
    admin.create_topic(name, 4)
    a = join(group_assignor=assignor, group_instance_id="1")
    b = join(group_assignor=assignor, group_instance_id="2")
    wait_until(lambda: [a.numbers, b.numbers] == expected, f"assigned by {assignor}")
    assert described(admin, name).assignor == assignor


def test_a_rack_aware_group_reads_replicas_in_its_racks(
    admin: AdminClient, join: Join, name: str
) -> None:
    made = admin.create_topic(name, 6, 1)
    nearby = {
        rack: {n for n, replicas in enumerate(made.replicas) if replicas == (node_id,)}
        for node_id, rack in RACKS.items()
    }
    members = {rack: join(group_assignor="rackaware", client_rack=rack) for rack in nearby}
    assert sorted(map(len, nearby.values())) == [2, 2, 2]
    wait_until(
        lambda: {rack: member.numbers for rack, member in members.items()} == nearby,
        "each member reads what is in its rack",
    )
    # Two partitions change places, and so does who reads them (KIP-881).
    swapped = {
        TopicPartition(name, min(nearby["east"])): 2,
        TopicPartition(name, min(nearby["west"])): 1,
    }
    admin.alter_partition_reassignments({key: [node_id] for key, node_id in swapped.items()})
    for key, node_id in swapped.items():
        for rack, numbers in nearby.items():
            (numbers.add if rack == RACKS[node_id] else numbers.discard)(key.partition)
    wait_until(
        lambda: {rack: member.numbers for rack, member in members.items()} == nearby,
        "each member reads what is in its rack now",
    )


def test_heartbeats_go_on_while_records_are_processed(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 2)
    a, b = join(session_timeout_ms=1_500), join(session_timeout_ms=1_500)
    wait_until(lambda: shared(a, b) == [1, 1], "a fair share")
    heard = list(b.listener.heard)
    with a.processing():
        time.sleep(4)  # Far beyond the session timeout.
        assert len(described(admin, name).members) == 2
    write(producer, name, 2, range(10))
    wait_until(lambda: len(a.values + b.values) == 10, "all is read")
    assert b.listener.heard == heard
    assert a.listener.of("lost") == set()


def test_code_that_blocks_holds_up_the_heartbeats_of_its_own_loop_alone(
    admin: AdminClient, join: Join, name: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(name, 2)
    blocked, other = join(session_timeout_ms=1_500), join()
    wait_until(lambda: shared(blocked, other) == [1, 1], "a fair share")
    blocked.ask(lambda consumer: time.sleep(4))  # Far beyond the session timeout.
    if kind is AsyncConsumer:
        wait_until(lambda: len(blocked.listener.of("lost")) == 1, "it hears what it lost")
    assert len(blocked.listener.of("lost")) == (kind is AsyncConsumer)
    texts = [one.message for one in caplog.records]
    late = [text for text in texts if text.startswith(f"group {name}: a heartbeat was ")]
    # A loaded machine may make others late, too; of the one that was blocked it is sure.
    assert late if kind is AsyncConsumer else not late
    assert all("asyncio.to_thread" in text for text in late)
    wait_until(lambda: shared(blocked, other) == [1, 1], "a fair share again")


def test_a_member_that_does_not_poll_is_left_behind_and_told_so(
    admin: AdminClient, join: Join, name: str
) -> None:
    admin.create_topic(name, 2)
    slow = join(max_poll_interval_ms=1_500, enable_auto_commit=False, client_id="slow")
    other = join()
    wait_until(lambda: shared(slow, other) == [1, 1], "a fair share")
    [held] = slow.owned
    with slow.processing():
        wait_until(lambda: len(other.owned) == 2, "the other takes over")
    with pytest.raises(MaxPollExceededError, match="max_poll_interval_ms=1500"):
        slow.ask(lambda consumer: consumer.commit({held: 1}))
    wait_until(lambda: slow.listener.of("lost") == {held.partition}, "it hears what it lost")
    wait_until(lambda: shared(slow, other) == [1, 1], "it joined again by polling")


def test_a_zombies_commit_is_refused_by_its_epoch(
    cluster: Cluster, admin: AdminClient, join: Join, name: str
) -> None:
    admin.create_topic(name, 2)
    a = join(client_id="a", enable_auto_commit=False)
    wait_until(lambda: a.numbers == {0, 1}, "all for a")
    before = by_client(admin, name)["a"]
    b = join(client_id="b", enable_auto_commit=False)
    wait_until(lambda: shared(a, b) == [1, 1], "a fair share")
    [moved] = b.owned

    def commit(member_id: str, epoch: int, offset: int) -> int:
        request = groups_pb2.CommitOffsetsRequest(
            group_id=name,
            member_id=member_id,
            member_epoch=epoch,
            offsets=[
                groups_pb2.OffsetCommit(
                    partition=common_pb2.TopicPartition(topic=name, partition=moved.partition),
                    offset=offset,
                )
            ],
        )
        with cluster.channel(described(admin, name).coordinator) as channel:
            answer = groups_pb2_grpc.GroupsStub(channel).CommitOffsets(request, timeout=10)
        return answer.error.code if answer.HasField("error") else answer.results[0].error.code

    # As a process would that hung with the commit before its partition went to the other.
    assert commit(before.member_id, before.member_epoch, 5) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit("who-was-removed", 1, 5) == ErrorCode.UNKNOWN_MEMBER_ID
    assert admin.list_group_offsets(name) == {}
    after = by_client(admin, name)["b"]
    assert commit(after.member_id, after.member_epoch, 7) == 0
    assert admin.list_group_offsets(name)[moved].offset == 7


def test_a_pattern_takes_in_topics_and_partitions_as_they_come(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(f"{name}.eu", 2)
    a = join(re.compile(re.escape(name) + r"\.(eu|us)"))
    b = join(re.compile(re.escape(name) + r"\.(eu|us)"))
    wait_until(lambda: shared(a, b) == [1, 1], "a fair share")
    admin.create_topic(f"{name}.us", 2)
    admin.create_topic(f"{name}.cn", 2)
    wait_until(lambda: shared(a, b) == [2, 2], "the new topic is shared")
    admin.create_partitions(f"{name}.eu", 4)
    wait_until(lambda: shared(a, b) == [3, 3], "the new partitions are shared")
    write(producer, f"{name}.eu", 4, range(20))
    write(producer, f"{name}.us", 2, range(20, 30))
    write(producer, f"{name}.cn", 2, range(30, 40))
    wait_until(lambda: len(a.values + b.values) == 30, "all of both is read")
    assert {topic for topic, _, _ in (a.seen + b.seen)} == {f"{name}.eu", f"{name}.us"}


def test_auto_commit_takes_what_was_handed_out_and_processed(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 1)
    place = TopicPartition(name, 0)
    write(producer, name, 1, range(10))
    member = join(auto_commit_interval_ms=50, max_poll_records=4)
    wait_until(lambda: len(member.seen) == 10, "all is read")

    def committed() -> int:
        found = admin.list_group_offsets(name).get(place)
        return -1 if found is None else found.offset

    wait_until(lambda: committed() == 10, "what was processed is committed in the background")
    with member.processing():
        time.sleep(0.2)  # Its last poll has ended by now.
        write(producer, name, 1, range(10, 20))
        time.sleep(0.5)  # Ten intervals, in which it prefetches what it did not hand out.
        assert committed() == 10
    wait_until(lambda: committed() == 20, "the rest")


def test_members_know_how_far_behind_they_are(
    admin: AdminClient, producer: Producer, join: Join, name: str
) -> None:
    admin.create_topic(name, 2)
    member = join()
    wait_until(lambda: member.numbers == {0, 1}, "an assignment")
    place = TopicPartition(name, 0)

    def lag() -> int | None:
        return member.ask(lambda consumer: consumer.current_lag(place))

    wait_until(lambda: lag() == 0, "there is nothing to be read")
    member.ask(lambda consumer: consumer.pause(place))
    write(producer, name, 2, range(20))
    wait_until(lambda: len(member.seen) == 10, "the other partition is read")
    member.ask(lambda consumer: consumer.resume(place))
    wait_until(lambda: len(member.seen) == 20, "all is read")
    wait_until(lambda: lag() == 0, "it is known that all is read")
    found = member.ask(lambda consumer: consumer.metrics())
    assert found.records_lag == {place: 0, TopicPartition(name, 1): 0}


def test_the_coordinators_metrics_show_the_lag_of_its_groups(
    cluster: Cluster, admin: AdminClient, producer: Producer
) -> None:
    admin.create_topic("lagging", 3)  # On all three nodes, each of which leads one partition.
    write(producer, "lagging", 3, range(30))
    admin.alter_group_offsets("behind", {TopicPartition("lagging", n): n for n in range(3)})
    coordinator = cluster.nodes[described(admin, "behind").coordinator]
    address = tomllib.loads(coordinator.config.read_text(encoding="utf-8"))["metrics"]["listen"]

    def shown() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return answer.read().decode()

    wanted = 'penstock_group_lag_records{group="behind",topic="lagging"} 27.0'
    wait_until(lambda: wanted in shown().splitlines(), "the lag is shown", 25)
    stalled = 'penstock_group_stalled_seconds{group="behind",topic="lagging"} '

    def stalled_s() -> float:
        found = [line for line in shown().splitlines() if line.startswith(stalled)]
        return float(found[0].rpartition(" ")[2])

    wait_until(lambda: stalled_s() > 0, "it is seen to stand still", 25)


def test_positions_are_committed_with_metadata_one_partition_at_a_time(
    admin: AdminClient, kind: Kind, join: Join, name: str
) -> None:
    admin.create_topic(name, 3)
    member = join(enable_auto_commit=False)
    wait_until(lambda: member.numbers == {0, 1, 2}, "an assignment")
    zero, one, two = (TopicPartition(name, number) for number in range(3))
    member.ask(lambda consumer: consumer.commit({zero: OffsetAndMetadata(5, metadata="by hand")}))
    if kind is Consumer:
        member.ask(lambda consumer: consumer.commit_async({one: 7}).result(30))
    else:
        assert kind is AsyncConsumer
        member.ask(lambda consumer: consumer.commit({one: 7}))
    found = member.ask(lambda consumer: consumer.committed(zero, one, two))
    assert found == {zero: OffsetAndMetadata(5, metadata="by hand"), one: OffsetAndMetadata(7),
                     two: None}  # fmt: skip
    assert admin.list_group_offsets(name)[zero].metadata == "by hand"
    with pytest.raises(GroupSubscribedToTopicError, match=name):
        admin.delete_group_offsets(name, [zero])
    member.stop()
    admin.delete_group_offsets(name, [zero])
    assert set(admin.list_group_offsets(name)) == {one}
