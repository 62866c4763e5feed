"""ControllerServer in this process: what start refuses, and how a failure comes out."""

from __future__ import annotations

import asyncio
import errno
import re
import socket

import pytest
from grpc import aio
from structlog.testing import capture_logs

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.controller import ControllerServer
from penstock.raft_meta.core import versions
from penstock.raft_meta.quorum import Leadership, Role
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.errors import (
    AddressInUseError,
    ConfigurationError,
    DataDirectoryError,
    InvalidRequestError,
    NotControllerError,
    RequestTimedOutError,
    StorageError,
)
from tests.integration.raft_meta.controllers import until

pytestmark = pytest.mark.integration


def config(directory, **changes) -> ControllerConfig:
    settings = {
        "node_id": 1,
        "cluster_id": "c",
        "data_dir": directory,
        "listen": ("127.0.0.1", 0),
        "voters": {1: ("127.0.0.1", 0)},
        "may_found": True,
    }
    return ControllerConfig(**{**settings, **changes})


async def leading(server) -> None:
    async def role() -> Role:
        return server.status().role

    await until(role, lambda it: it is Role.LEADER)


def command(sequence: int, epoch: int) -> bytes:
    return cluster_pb2.Command(
        controller_epoch=epoch, sequence=sequence, delete_topic={"name": "x"}
    ).SerializeToString()


async def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ControllerServer(config(tmp_path, listen=("127.0.0.1", port)))
        with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}"):
            await server.start()
    await server.stop()


async def test_another_clusters_directory_is_refused(tmp_path):
    server = ControllerServer(config(tmp_path))
    await server.start()
    await server.stop()
    for changes in ({"cluster_id": "other"}, {"node_id": 2, "voters": {2: ("127.0.0.1", 0)}}):
        other = ControllerServer(config(tmp_path, **changes))
        with pytest.raises(DataDirectoryError, match="belongs to"):
            await other.start()
    again = ControllerServer(config(tmp_path))
    await again.start()
    await again.stop()


async def test_two_processes_cannot_share_a_directory(tmp_path):
    server = ControllerServer(config(tmp_path))
    await server.start()
    with pytest.raises(DataDirectoryError, match="another process"):
        await ControllerServer(config(tmp_path)).start()
    await server.stop()
    await server.stop()


async def test_an_engine_failure_ends_the_controller(tmp_path):
    server = ControllerServer(config(tmp_path))
    await server.start()
    await leading(server)

    def fail(_voter, _now_s):
        raise OSError(errno.EIO, "the disk is gone")

    failed = server.wait_failed()
    server._quorum._thread.submit(fail)
    with pytest.raises(StorageError, match=f"{re.escape(str(tmp_path))}.*the disk is gone"):
        await asyncio.wait_for(failed, 10)
    await server.stop()


@pytest.mark.parametrize("snapshot_entries", [5_000, 10], ids=["log", "snapshot"])
async def test_software_too_old_for_the_cluster_ends_before_it_takes_part(
    tmp_path, monkeypatch, snapshot_entries
):
    settings = config(tmp_path, snapshot_entries=snapshot_entries)
    server = ControllerServer(settings)
    await server.start()
    await leading(server)
    for sequence in range(20):
        await server._quorum.propose(command(sequence, 1))
    await server.stop()
    monkeypatch.setattr(versions, "METADATA_VERSION", 1)
    older = ControllerServer(settings)

    async def run() -> None:
        await older.start()
        await asyncio.wait_for(older.wait_failed(), 10)

    with pytest.raises(versions.SoftwareTooOldError, match="install a newer Penstock"):
        await run()
    await older.stop()


async def test_a_state_machine_failure_ends_the_controller(tmp_path):
    server = ControllerServer(config(tmp_path))
    await server.start()
    await leading(server)

    def fail(*_arguments):
        raise ValueError("cannot apply")

    server._quorum._machine.apply = fail
    proposal = asyncio.ensure_future(server._quorum.propose(command(1, 1)))
    with pytest.raises(ValueError, match="cannot apply"):
        await asyncio.wait_for(server.wait_failed(), 10)
    with pytest.raises(RequestTimedOutError):
        await proposal
    await server.stop()


async def test_a_leader_elected_before_start_returns_becomes_active(tmp_path, monkeypatch):
    """A voter that is alone leads at once; its claim must not be refused as not started yet."""
    original = asyncio.wrap_future
    led = asyncio.Event()

    async def late(future):
        await original(future)
        await asyncio.wait_for(led.wait(), 10)

    def heard(leadership: Leadership) -> None:
        if leadership.leading:
            led.set()

    monkeypatch.setattr(asyncio, "wrap_future", late)
    server = ControllerServer(config(tmp_path))
    # After the controller's own listener, so the claim has been made by the time that it is heard.
    server._quorum.add_leadership_listener(heard)
    with capture_logs() as logs:
        await server.start()
        await until(lambda: server._shell._core.is_active)
    assert "a proposal was not taken" not in [entry["event"] for entry in logs]
    await server.stop()


async def test_proposals_of_a_lone_follower_and_of_a_stopped_controller_are_refused(tmp_path):
    voters = {1: ("127.0.0.1", 0), 2: ("127.0.0.1", 9)}
    server = ControllerServer(config(tmp_path, voters=voters))
    await server.start()
    with pytest.raises(NotControllerError, match="not the active one"):
        await server._quorum.propose(b"x")
    with pytest.raises(NotControllerError):
        await server._quorum.read_index()
    await server.stop()
    with pytest.raises(NotControllerError, match="stopped"):
        await server._quorum.propose(b"x")


async def test_reads_are_linearizable_and_large_commands_refused(tmp_path):
    server = ControllerServer(config(tmp_path))
    await server.start()
    await leading(server)
    result = await server._quorum.propose(command(1, server.status().term))
    index = cluster_pb2.CommandResult.FromString(result).index
    assert await server._quorum.read_index() >= index
    with pytest.raises(InvalidRequestError, match="262144 are allowed"):
        await server._quorum.propose(b"x" * 300_000)
    await server.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"voters": {}}, "controller.quorum.voters is empty"),
        ({"cluster_id": ""}, "cluster id is empty"),
        ({"election_timeout_max_ms": 500}, "must be above"),
        ({"raft_heartbeat_ms": 200}, "below a third"),
        ({"snapshot_entries": 1}, "snapshot_entries"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **changes)


async def test_a_command_that_changes_nothing_can_be_seen_at_once(tmp_path):
    """Its own index reaches no broker: whoever waited for that would wait for the next change."""
    server = ControllerServer(config(tmp_path))
    await server.start()
    await until(lambda: server._shell._core.is_active)
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = ControllerStub(channel)
        feed = stub.WatchMetadata(controller_pb2.WatchMetadataRequest(cluster_id="c", node_id=1))
        seen = (await feed.read()).delta.index
        for _ in range(2):
            request = controller_pb2.ExecuteAdminRequest()
            request.command.alter_topic_configs.topic = "nosuch"
            refused = await stub.ExecuteAdmin(request)
            assert refused.result.HasField("error")
            assert refused.result.index <= seen
        feed.cancel()
    await server.stop()
