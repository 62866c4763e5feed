"""Controllers as real processes: elections, commands, kill -9, restarts, intruders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

import grpc
import pytest
from grpc import aio

from penstock.v1 import cluster_pb2, controller_pb2, raft_pb2, raft_pb2_grpc
from penstock.wire.errors import ErrorCode
from tests.integration.ports import free_ports
from tests.integration.raft_meta.controllers import (
    OLD_RUNNER,
    Controllers,
    registration,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]


@pytest.fixture
async def controllers(tmp_path, request):
    count = getattr(request, "param", 3)
    controllers = Controllers(tmp_path, count)
    yield controllers
    await controllers.close()


async def create_topic(controllers, node, name) -> cluster_pb2.CommandResult:
    command = cluster_pb2.Command(
        create_topic={"name": name, "partition_count": 2, "replication_factor": 1}
    )
    return await controllers.admin(node, command)


async def unfenced_broker(controllers, node, broker_id=7):
    """Register a broker at the active controller and heartbeat until it is unfenced."""
    answer = await controllers.stub(node).RegisterBroker(registration(broker_id), timeout=5)
    assert not answer.HasField("error"), answer.error
    call = controllers.stub(node).Heartbeat()
    await beat(call, broker_id, answer.broker_epoch)

    async def fenced() -> bool:
        return (await call.read()).fenced

    await until(fenced, lambda is_fenced: not is_fenced)
    return call, answer.broker_epoch


async def beat(call, broker_id, epoch, sequence=1) -> None:
    await call.write(
        controller_pb2.BrokerHeartbeatRequest(
            node_id=broker_id, broker_epoch=epoch, metadata_index=1 << 40, sequence=sequence
        )
    )


def topics(delta) -> set[str]:
    return {topic.name for topic in delta.topics}


async def same_everywhere(controllers, nodes, wanted) -> None:
    for node in nodes:
        await until(lambda node=node: controllers.metadata(node), lambda d: topics(d) == wanted)

    async def states() -> list[tuple[cluster_pb2.MetadataDelta, object]]:
        return [(await controllers.metadata(n), await controllers.quorum(n)) for n in nodes]

    # What one has applied before the others, as that a broker is gone, they apply soon after ...
    found = await until(states, lambda found: len({delta.index for delta, _ in found}) == 1)
    # ... and whoever has applied as much says the same, whenever it is asked.
    assert len({str(delta) for delta, _ in found}) == 1, found


@pytest.mark.parametrize("controllers", [1, 2, 3], indirect=True)
async def test_commands_are_carried_out_and_survive_a_planned_stop(controllers):
    controllers.start()
    node = await controllers.active()
    call, _ = await unfenced_broker(controllers, node)
    for number in range(5):
        result = await create_topic(controllers, node, f"topic-{number}")
        assert not result.HasField("error"), result.error
        assert len(result.create_topic.topic_id) == 16  # Drawn by the controller.
    wanted = {f"topic-{number}" for number in range(5)}
    await same_everywhere(controllers, controllers.ports, wanted)
    call.cancel()
    controllers.stop()
    controllers.start()
    await controllers.active()
    await same_everywhere(controllers, controllers.ports, wanted)


async def test_kill_9_of_the_active_controller(controllers):
    controllers.start()
    node = await controllers.active()
    call, _ = await unfenced_broker(controllers, node)
    assert not (await create_topic(controllers, node, "before")).HasField("error")
    call.cancel()
    controllers.kill(node)
    after = await controllers.active()
    assert after != node
    quorum = await controllers.quorum(after)
    assert quorum.leader_id == quorum.answered_by == after
    assert [voter.node_id for voter in quorum.voters] == [1, 2, 3]
    # The broker left without a word to the new one, which gives it a whole session to come.
    await until(lambda: controllers.metadata(after), lambda d: all(b.fenced for b in d.brokers))
    call, _ = await unfenced_broker(controllers, after)
    assert not (await create_topic(controllers, after, "after")).HasField("error")
    call.cancel()
    controllers.start(node)
    await same_everywhere(controllers, controllers.ports, {"before", "after"})


async def test_the_active_controller_hands_over_when_it_is_stopped(controllers):
    controllers.start()
    node = await controllers.active()
    term = (await controllers.quorum(node)).term
    controllers.stop(node)
    assert "handed over" in controllers.log(node)
    after = await controllers.active()
    quorum = await controllers.quorum(after)
    assert (quorum.leader_id, quorum.term) == (after, term + 1)  # One election, won at once.


async def test_controllers_that_all_stop_at_once_do_not_wait_for_each_other(controllers):
    controllers.start()
    await controllers.active()
    controllers.stop()
    controllers.start()
    await controllers.active()


async def test_kill_9_of_all_again_and_again_loses_nothing(controllers):
    """Commands go on while the processes die; whatever was answered is there afterwards."""
    acknowledged: set[str] = set()
    for attempt in range(3):
        controllers.start()
        node = await controllers.active()
        call, _ = await unfenced_broker(controllers, node)

        async def create_on(node=node, attempt=attempt) -> None:
            for number in range(10_000):
                name = f"t{attempt}-{number}"
                with contextlib.suppress(aio.AioRpcError):
                    result = await create_topic(controllers, node, name)
                    if not result.HasField("error"):
                        acknowledged.add(name)

        working = asyncio.create_task(create_on())
        before = len(acknowledged)
        await until(lambda: len(acknowledged), lambda n, b=before: n > b + 20)
        controllers.kill()
        working.cancel()
        call.cancel()
        assert len(acknowledged) > before + 20
    controllers.start()
    node = await controllers.active()
    assert acknowledged <= topics(await controllers.metadata(node))


async def test_a_controller_far_behind_catches_up_by_snapshot(controllers):
    controllers.start(snapshot_entries=20)
    await controllers.active()  # The first start needs them all.
    controllers.kill(3)
    node = await controllers.active()
    call, _ = await unfenced_broker(controllers, node)
    for number in range(100):
        assert not (await create_topic(controllers, node, f"topic-{number}")).HasField("error")
    controllers.start(3, snapshot_entries=20)
    await same_everywhere(controllers, (1, 2, 3), {f"topic-{number}" for number in range(100)})
    assert "metadata snapshot taken over" in controllers.log(3)
    assert (controllers.directory / "node-3" / "snapshot").exists()
    call.cancel()
    controllers.kill()
    controllers.start()
    await controllers.active()
    await same_everywhere(controllers, (1, 2, 3), {f"topic-{number}" for number in range(100)})


async def test_watchers_see_every_change_once_and_in_order_at_any_controller(controllers):
    controllers.start()
    node = await controllers.active()
    call, _ = await unfenced_broker(controllers, node)
    seen: dict[int, list[controller_pb2.WatchMetadataResponse]] = {n: [] for n in controllers.ports}

    async def watch(at: int) -> None:
        async for response in controllers.watch(at):
            seen[at].append(response)

    watching = [asyncio.create_task(watch(at)) for at in controllers.ports]
    await until(lambda: all(seen.values()))
    for number in range(30):
        await create_topic(controllers, node, f"topic-{number}")

    def complete() -> bool:
        return all(sum(len(r.delta.topics) for r in responses) >= 30 for responses in seen.values())

    await until(complete)
    for responses in seen.values():
        first, *changes = responses
        assert first.delta.snapshot
        assert first.active_controller.node_id == node
        assert first.active_controller.port == controllers.ports[node]
        assert not any(change.delta.snapshot for change in changes)
        indexes = [response.delta.index for response in responses]
        assert indexes == sorted(set(indexes))
        names = [topic.name for response in responses for topic in response.delta.topics]
        assert names == [f"topic-{number}" for number in range(30)]
    controllers.kill(node)
    others = [at for at in controllers.ports if at != node]

    def moved() -> bool:
        return all(
            any(r.active_controller.node_id in others for r in seen[at] if r.delta.index)
            for at in others
        )

    await until(moved, seconds=60)
    call.cancel()
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_a_broker_whose_stream_breaks_is_fenced_before_its_session_is_over(controllers):
    controllers.start(broker_session_timeout_ms=600_000)
    node = await controllers.active()
    call, epoch = await unfenced_broker(controllers, node)
    await beat(call, 7, epoch, sequence=2)
    began = time.monotonic()
    call.cancel()
    await until(lambda: controllers.metadata(node), lambda d: d.brokers[0].fenced, seconds=60)
    assert time.monotonic() - began > 0.15, "it may come back at once"


async def test_only_the_active_controller_acts_and_the_others_name_it(controllers):
    controllers.start()
    node = await controllers.active()
    other = next(n for n in controllers.ports if n != node)
    result = await until(
        lambda: create_topic(controllers, other, "x"),
        # The active one acts before the others have heard of it.
        lambda answer: answer.error.current_leader.node_id == node,
    )
    assert result.error.code == ErrorCode.NOT_CONTROLLER
    assert result.error.current_leader.port == controllers.ports[node]
    answer = await controllers.stub(other).RegisterBroker(registration(7), timeout=5)
    assert answer.error.code == ErrorCode.NOT_CONTROLLER

    async def refused() -> bool:
        """The stream may be ended before anything was written, and gRPC may call that a failure."""
        call = controllers.stub(other).Heartbeat()
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await beat(call, 7, 1)
        assert (await call.read()).error.code == ErrorCode.NOT_CONTROLLER
        return await call.read() is aio.EOF

    assert await until(refused)


async def test_brokers_may_not_forward_what_is_no_administrators_business(controllers):
    controllers.start()
    node = await controllers.active()
    for command in (
        cluster_pb2.Command(),
        cluster_pb2.Command(fence_broker={"node_id": 1}),
        cluster_pb2.Command(become_controller={"controller_id": 2}),
    ):
        result = await controllers.admin(node, command)
        assert result.error.code == ErrorCode.INVALID_REQUEST


async def test_a_minority_commits_nothing(controllers):
    controllers.start()
    node = await controllers.active()
    controllers.kill(*(n for n in controllers.ports if n != node))
    result = await create_topic(controllers, node, "lost")
    assert result.error.code in (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_CONTROLLER)
    assert "may" in result.error.message or "active" in result.error.message


@pytest.mark.parametrize("controllers", [1, 2, 3], indirect=True)
async def test_a_controller_whose_software_is_too_old_is_not_made_a_voter(controllers):
    controllers.start()
    active = await controllers.active()
    members = {voter.node_id for voter in (await controllers.quorum(active)).voters}
    (controllers.ports[9],) = free_ports(1)
    voters = {str(n): ["127.0.0.1", controllers.ports[n]] for n in members}
    controllers.start(9, runner=OLD_RUNNER, voters=voters, may_found=False)
    await until(lambda: controllers.quorum(9))

    async def add() -> controller_pb2.AlterVotersResponse:
        new = controller_pb2.QuorumVoter(node_id=9, host="127.0.0.1", port=controllers.ports[9])
        request = controller_pb2.AlterVotersRequest(add=new)
        return await controllers.stub(active).AlterVoters(request, timeout=20)

    refused = await until(add, lambda a: a.error.code != ErrorCode.VOTER_CHANGE_IN_PROGRESS)
    assert refused.error.code == ErrorCode.UNSUPPORTED_METADATA_VERSION, refused
    assert "controller 9 knows metadata.version 1 to 1" in refused.error.message
    assert "next: install a newer Penstock on node 9" in refused.error.message
    assert controllers.processes[9].poll() is None
    after = await controllers.quorum(active)
    assert {voter.node_id for voter in after.voters} == members
    assert after.confirmed


async def test_another_clusters_controller_and_broker_are_refused(controllers):
    controllers.start()
    await controllers.active()
    term = (await controllers.quorum(1)).term
    controllers.kill(3)
    controllers.start(3, cluster_id="other", data_dir=str(controllers.directory / "other"))
    await until(lambda: controllers.log(3), lambda text: "mixes two clusters" in text)
    assert (await controllers.quorum(3)).leader_id == -1
    node = await controllers.active()
    assert (await controllers.quorum(node)).term <= term + 1
    request = controller_pb2.WatchMetadataRequest(cluster_id="other", node_id=9)
    response = await controllers.stub(node).WatchMetadata(request).read()
    assert response.error.code == ErrorCode.INCONSISTENT_CLUSTER_ID


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (None, "begins with a hello"),
        ({"cluster_id": "integration", "node_id": 9, "receiver_node_id": 1}, "which directory"),
        ({"cluster_id": "integration", "node_id": 1, "receiver_node_id": 1}, "not another node"),
        ({"cluster_id": "integration", "node_id": 2, "receiver_node_id": 3}, "looks for node 3"),
    ],
)
async def test_a_raft_stream_must_introduce_itself(controllers, hello, reason):
    controllers.start(1)
    await until(lambda: controllers.quorum(1))
    async with aio.insecure_channel(f"127.0.0.1:{controllers.ports[1]}") as channel:
        call = raft_pb2_grpc.RaftStub(channel).Exchange()  # type: ignore[call-arg]
        first = raft_pb2.RaftExchangeRequest(term=1 << 40, term_notice=raft_pb2.TermNotice())
        if hello is not None:
            first = raft_pb2.RaftExchangeRequest(hello=hello)
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(first)
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason in await call.details()
    assert (await controllers.quorum(1)).term == 0


async def test_garbage_on_the_port_and_in_the_protocol_is_survived(controllers):
    controllers.start()
    node = await controllers.active()
    for _ in range(20):
        address = ("127.0.0.1", controllers.ports[node])
        with socket.create_connection(address) as intruder, contextlib.suppress(OSError):
            intruder.sendall(os.urandom(4096))
    peer = next(n for n in controllers.ports if n != node)
    async with aio.insecure_channel(f"127.0.0.1:{controllers.ports[node]}") as channel:
        raw = channel.stream_unary("/penstock.v1.Raft/Exchange")  # type: ignore[call-arg]
        hello = raft_pb2.RaftExchangeRequest(
            hello={
                "cluster_id": "integration",
                "node_id": peer,
                "receiver_node_id": node,
                "directory_id": b"d" * 16,
            }
        )
        call = raw()  # type: ignore[call-arg]  # The stubs want more.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(hello.SerializeToString())
            for size in range(200):
                await call.write(os.urandom(size))
            await call.done_writing()
            await call
    node = await controllers.active()
    assert (await controllers.quorum(node)).leader_id == node
    assert all(process.poll() is None for process in controllers.processes.values())
