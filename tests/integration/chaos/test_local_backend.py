"""Each fault of the local backend at real nodes: it bites, it is healed, and twice is as once."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from random import Random

import grpc
import pytest

from penstock.chaos.backends import files, processes
from penstock.chaos.backends.unsynced import Kind, read_changes
from penstock.chaos.cluster import CLIENTS, OFFERED, Capability, DiskFault, Link, LinkFault
from penstock.chaos.errors import ClusterError, FaultError
from penstock.cli.chaos.local_backend import LocalBackend
from penstock.cli.chaos.node_networks import Loopback
from penstock.client import (
    AdminClient,
    Consumer,
    DiskFullError,
    Producer,
    RecordMetadata,
    TopicPartition,
)
from tests.integration import raw
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0
CUT = LinkFault(cut=True)
SETTINGS: dict[str, str | int] = {
    "broker.session.timeout.ms": 2_000,
    "broker.heartbeat.interval.ms": 300,
    "replica.lag.time.max.ms": 2_000,
    "leader.imbalance.enable": "false",
    "offsets.topic.num.partitions": 2,
    "transaction.state.topic.num.partitions": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    backend = LocalBackend(tmp_path_factory.mktemp("chaos"), settings=SETTINGS)
    try:
        backend.start()
        yield backend
    finally:
        backend.stop()


@pytest.fixture
def backend(made: LocalBackend) -> Iterator[LocalBackend]:
    yield made
    for _ in range(2):  # Idempotent.
        made.heal_all()
    made.wait_ready(TIMEOUT_S)


def make_topic(backend: LocalBackend, name: str, leader: int = 1, **configs: str) -> None:
    others = [node for node in backend.nodes if node != leader]
    with AdminClient(backend.bootstrap) as admin:
        wanted = {"min.insync.replicas": "2", **configs}
        admin.create_topic(name, configs=wanted, replica_assignments=[[leader, *others]])


def address(backend: LocalBackend, node: int) -> str:
    """Where clients reach it, through the relay."""
    return backend.bootstrap.split(",")[node - 1]


def produce_at(backend: LocalBackend, node: int, topic: str, timeout_ms: int = 3_000) -> int:
    """The offset; raises RpcError where the node is not reached, or says no."""
    values = [b"value"]
    result = raw.produce_at(
        address(backend, node), topic, raw.batch_of(values), timeout_ms=timeout_ms
    )
    assert not result.HasField("error"), result.error.message
    return result.base_offset


def ask(backend: LocalBackend, node: int) -> None:
    """Something on a new connection; raises RpcError where nobody answers."""
    with raw.channel(address(backend, node)) as channel:
        stub = raw.log_pb2_grpc.LogStub(channel)
        stub.ListOffsets(raw.log_pb2.ListOffsetsRequest(), timeout=3)


def partition(backend: LocalBackend, topic: str, ask: int) -> tuple[int, set[int]]:
    """Leader and ISR as one node knows them."""
    with AdminClient(address(backend, ask)) as admin:
        [found] = admin.describe_topics([topic])
    return found.partitions[0].leader, set(found.partitions[0].isr)


def isolated(backend: LocalBackend, node: int) -> dict[Link, LinkFault]:
    others = [one for one in (CLIENTS, *backend.nodes) if one != node]
    pairs = [*product([node], others), *product(others, [node])]
    return {Link(source, target): CUT for source, target in pairs}


def test_it_can_do_what_it_says(backend: LocalBackend) -> None:
    assert backend.capabilities == OFFERED["local"]
    assert list(backend.nodes) == [1, 2, 3]
    with pytest.raises(FaultError, match="is no link"):
        backend.set_links({Link(1, 9): CUT})
    with pytest.raises(FaultError, match="EIEIO is no errno"):
        backend.set_disk(1, DiskFault(errno="EIEIO"))


# --- processes


def test_processes_are_killed_stopped_paused_and_started(backend: LocalBackend) -> None:
    first = backend.pid(2)
    backend.kill(2)
    backend.kill(2)
    assert (backend.pid(2), sorted(backend.running)) == (None, [1, 3])
    with pytest.raises(ClusterError, match="node 2 is down"):
        backend.wait_ready(TIMEOUT_S)
    backend.start_node(2)
    backend.start_node(2)
    backend.wait_ready(TIMEOUT_S)
    second = backend.pid(2)
    assert second not in (None, first)

    backend.pause(2)
    backend.pause(2)
    assert second is not None
    assert processes.state(second) == "T"
    assert 2 in backend.running
    with pytest.raises(grpc.RpcError):
        ask(backend, 2)
    backend.resume(2)
    backend.resume(2)
    backend.wait_ready(TIMEOUT_S)

    backend.pause(2)  # It goes on in order to stop.
    backend.terminate(2)
    backend.terminate(2)
    assert backend.pid(2) is None
    log = backend.log(2)
    assert log is not None
    text = log.read_text()
    assert text.count("listening for frames") >= 2, "the log has all lives"
    assert "stopped" in text.splitlines()[-1]


def test_a_node_that_ends_by_itself_is_noted(backend: LocalBackend) -> None:
    pid = backend.pid(3)
    assert pid is not None
    os.kill(pid, 11)
    wait_until(lambda: backend.pid(3) is None, "it is gone")
    backend.start_node(3)
    backend.wait_ready(TIMEOUT_S)
    log = backend.log(3)
    assert log is not None
    assert f"node 3 (pid {pid}) ended by itself: killed by SIGSEGV" in log.read_text()


# --- links


def test_an_isolated_leader_is_out_of_reach_and_another_is_elected(backend: LocalBackend) -> None:
    make_topic(backend, "isolated", leader=1)
    produce_at(backend, 1, "isolated")
    for _ in range(2):
        backend.set_links(isolated(backend, 1))
    with pytest.raises(grpc.RpcError):
        produce_at(backend, 1, "isolated")
    wait_until(
        lambda: partition(backend, "isolated", ask=2)[0] in (2, 3), "another leads", TIMEOUT_S
    )
    leader, _ = partition(backend, "isolated", ask=2)
    wait_until(
        lambda: 1 not in partition(backend, "isolated", ask=2)[1], "it is out of sync", TIMEOUT_S
    )
    produce_at(backend, leader, "isolated", timeout_ms=30_000)
    assert sorted(backend.running) == [1, 2, 3]
    backend.set_links({})
    wait_until(
        lambda: partition(backend, "isolated", ask=1) == (leader, {1, 2, 3}),
        "it is back",
        TIMEOUT_S,
    )


def test_a_follower_that_cannot_hear_its_leader_alone_falls_out(backend: LocalBackend) -> None:
    """One way between two nodes: all others, and both with the clients, are as they were. Neither
    is the active controller, which has to be heard and to hear.
    """
    with AdminClient(backend.bootstrap) as admin:
        controller = admin.describe_quorum().leader_id
    leader, follower = (node for node in backend.nodes if node != controller)
    make_topic(backend, "oneway", leader=leader)
    produce_at(backend, leader, "oneway")
    backend.set_links({Link(leader, follower): CUT})
    produce_at(backend, leader, "oneway", timeout_ms=30_000)  # Waits until the follower is out.
    wait_until(
        lambda: partition(backend, "oneway", ask=controller) == (leader, {leader, controller}),
        "it is out",
        TIMEOUT_S,
    )
    backend.set_links({})
    wait_until(
        lambda: partition(backend, "oneway", ask=controller) == (leader, {1, 2, 3}),
        "it is back",
        TIMEOUT_S,
    )


def test_acknowledgements_alone_are_held(backend: LocalBackend) -> None:
    make_topic(backend, "held", leader=2)
    with (
        Producer(backend.bootstrap, delivery_timeout_ms=600_000, request_timeout_ms=300_000) as one,
        AdminClient(backend.bootstrap) as admin,
    ):
        one.send("held", b"before").result(TIMEOUT_S)
        fault = LinkFault(hold=("Produce",), hold_ms=3_600_000)
        backend.set_links({Link(node, CLIENTS): fault for node in backend.nodes})
        future = one.send("held", b"held")
        tp = TopicPartition("held", 0)
        wait_until(lambda: admin.list_offsets({tp: "latest"})[tp].offset == 2, "it was appended")
        assert not future.done()
        assert partition(backend, "held", ask=2) == (2, {1, 2, 3})
        backend.set_links({})
        assert future.result(TIMEOUT_S).offset == 1


# --- disks


def test_on_a_full_disk_a_node_refuses_and_lives(backend: LocalBackend) -> None:
    make_topic(backend, "full", leader=1)
    with Producer(backend.bootstrap, delivery_timeout_ms=3_000, request_timeout_ms=2_000) as one:
        one.send("full", b"before").result(TIMEOUT_S)
        for _ in range(2):
            backend.set_disk(1, DiskFault(errno="ENOSPC"))
        assert isinstance(one.send("full", b"refused").exception(TIMEOUT_S), DiskFullError)
        assert 1 in backend.running
        backend.set_disk(1, None)

        def is_taken() -> bool:
            return one.send("full", b"after").exception(TIMEOUT_S) is None

        wait_until(is_taken, "it takes records again", TIMEOUT_S)


def test_a_sync_that_fails_costs_the_node_its_directory_until_it_starts_anew(
    backend: LocalBackend,
) -> None:
    make_topic(backend, "unsynced", leader=3)
    produce_at(backend, 3, "unsynced")
    backend.set_disk(3, DiskFault(errno="EIO", of_sync=True))
    try:
        produce_at(backend, 3, "unsynced")
    except (AssertionError, grpc.RpcError):
        pass  # Nothing that could not be synced is acknowledged by it.
    else:
        raise AssertionError("it was acknowledged")
    wait_until(
        lambda: partition(backend, "unsynced", ask=1)[0] in (1, 2), "another leads", TIMEOUT_S
    )
    backend.set_disk(3, None)
    backend.kill(3)
    backend.start_node(3)
    wait_until(
        lambda: partition(backend, "unsynced", ask=1)[1] == {1, 2, 3}, "it is back", TIMEOUT_S
    )


def test_a_slow_disk_slows_what_waits_for_it(backend: LocalBackend) -> None:
    make_topic(backend, "slow", leader=1)
    produce_at(backend, 1, "slow")
    backend.set_disk(1, DiskFault(delay_ms=300))
    began = time.monotonic()
    produce_at(backend, 1, "slow", timeout_ms=30_000)
    assert time.monotonic() - began >= 0.3


def read_all(backend: LocalBackend, topic: str, at_least: int) -> set[bytes]:
    seen: list[bytes] = []

    def is_read() -> bool:
        seen.extend(record.value or b"" for record in consumer.poll(500))
        return len(seen) >= at_least

    with Consumer(backend.bootstrap, topics=topic, auto_offset_reset="earliest") as consumer:
        wait_until(is_read, "everything acknowledged is read", TIMEOUT_S)
    assert len(set(seen)) == len(seen)
    return set(seen)


def stands_with_unsynced(backend: LocalBackend, node: int) -> bool:
    """Pause it; goes on with it where just now there is nothing that power could take from it."""
    backend.pause(node)
    notes = backend.lost_path.parent / "disks" / f"node-{node}"
    [journal] = notes.glob("journal-*")
    found = [one for one in read_changes(journal.read_bytes()) if not one.is_durable]
    stands = any(one.kind is Kind.WRITE and one.done_at and one.length for one in found)
    if not stands:
        backend.resume(node)
    return stands


def lost_of(backend: LocalBackend) -> list[dict[str, object]]:
    return [json.loads(line) for line in backend.lost_path.read_text().splitlines()]


def test_what_is_acknowledged_survives_that_all_lose_power_at_once(backend: LocalBackend) -> None:
    make_topic(backend, "power", leader=1)
    for node in (*backend.nodes, *backend.nodes):  # Slow, so that much is not synced at any time.
        backend.set_disk(node, DiskFault(keep_unsynced=False, delay_ms=10))
    acknowledged: set[bytes] = set()
    is_over = threading.Event()

    def send() -> None:
        with Producer(backend.bootstrap, linger_ms=0, delivery_timeout_ms=120_000) as producer:
            for number in itertools.count():
                if is_over.is_set():
                    return
                waiting.append((b"%d" % number, producer.send("power", b"%d" % number)))
                while len(waiting) > 20 or (waiting and waiting[0][1].done()):
                    value, future = waiting.popleft()
                    if future.exception(TIMEOUT_S * 2) is None:
                        acknowledged.add(value)

    waiting: deque[tuple[bytes, Future[RecordMetadata]]] = deque()
    sending = threading.Thread(target=send)
    sending.start()
    try:
        for _ in range(2):
            wanted = len(acknowledged) + 20
            wait_until(lambda n=wanted: len(acknowledged) >= n, "some are acknowledged", TIMEOUT_S)
            wait_until(lambda: stands_with_unsynced(backend, 1), "it stands at that", TIMEOUT_S)
            for node in (2, 3):
                backend.pause(node)  # So that nothing is synced between the first and the last.
            for node in backend.nodes:
                backend.kill(node)
            backend.start()
    finally:
        is_over.set()
        sending.join()
    assert acknowledged <= read_all(backend, "power", len(acknowledged))
    assert len(lost_of(backend)) == 6
    assert all(lost["writes"] for lost in lost_of(backend) if lost["node"] == 1)
    for node in backend.nodes:
        log = backend.log(node)
        assert log is not None
        assert "Traceback" not in log.read_text()


def test_what_is_left_to_the_system_is_lost_with_the_power(tmp_path: Path) -> None:
    settings = {**SETTINGS, "flush.policy": "os"}
    backend = LocalBackend(tmp_path / "run", 1, settings=settings, network=Loopback())
    assert Capability.LINKS not in backend.capabilities
    try:
        backend.start()
        with AdminClient(backend.bootstrap) as admin:
            admin.create_topic("t", 1, 1)
        with Producer(backend.bootstrap) as producer:
            producer.send("t", b"kept").result(TIMEOUT_S)
        backend.kill(1)
        backend.start()
        backend.set_disk(1, DiskFault(keep_unsynced=False))
        with Producer(backend.bootstrap) as producer:
            assert producer.send("t", b"lost").result(TIMEOUT_S).offset == 1
        backend.kill(1)
        backend.set_disk(1, None)
        backend.start()
        tp = TopicPartition("t", 0)
        with AdminClient(backend.bootstrap) as admin:
            assert admin.list_offsets({tp: "latest"})[tp].offset == 1
        assert read_all(backend, "t", 1) == {b"kept"}
        [lost] = lost_of(backend)
        assert lost["node"] == 1
        assert lost["write_bytes"]
    finally:
        backend.stop()
        backend.stop()


# --- files


def test_a_flipped_bit_below_the_high_watermark_is_repaired(backend: LocalBackend) -> None:
    make_topic(backend, "flipped", leader=1)
    with Producer(backend.bootstrap, linger_ms=0) as producer:
        sent = {b"%d" % n * 100 for n in range(50)}
        for value in sent:
            producer.send("flipped", value)
    backend.terminate(1)
    [segment] = files.segments(backend.data_directory(1), "flipped")
    whole = segment.read_bytes()
    files.flip_bits(segment, Random(1), count=3, first_byte=61)
    assert segment.read_bytes() != whole
    backend.start_node(1)
    backend.wait_ready(TIMEOUT_S)
    with AdminClient(backend.bootstrap) as admin:
        wait_until(
            lambda: partition(backend, "flipped", ask=1)[1] == {1, 2, 3}, "in sync", TIMEOUT_S
        )
        admin.elect_leaders([TopicPartition("flipped", 0)])
    assert read_all(backend, "flipped", len(sent)) == sent


# --- limits


def test_without_descriptors_nobody_new_is_let_in(backend: LocalBackend) -> None:
    pid = backend.pid(2)
    assert pid is not None
    for _ in range(2):
        backend.set_limits(2, descriptors=3)  # All of these it has already.
    with pytest.raises(grpc.RpcError):
        ask(backend, 2)
    assert backend.pid(2) == pid
    backend.set_limits(2)
    backend.wait_ready(TIMEOUT_S)
    ask(backend, 2)


def test_memory_may_be_limited_and_given_back(backend: LocalBackend) -> None:
    pid = backend.pid(3)
    assert pid is not None
    free = "Max data size             unlimited"
    limits = Path(f"/proc/{pid}/limits")
    assert free in limits.read_text()
    most = processes.data_bytes(pid) + (64 << 20)
    backend.set_limits(3, memory_bytes=most)
    assert f"Max data size             {most}" in limits.read_text()
    backend.kill(3)
    backend.start_node(3)  # The limit is the node's, not the process'.
    pid = backend.pid(3)
    limits = Path(f"/proc/{pid}/limits")
    assert f"Max data size             {most}" in limits.read_text()
    backend.set_limits(3)
    assert free in limits.read_text()
