"""The services on the controller port, asked for nonsense: refused clearly, and they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.raft_meta import controller
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.controller import ControllerServer
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.voters import DIRECTORY_ID_BYTES
from penstock.v1 import cluster_pb2, controller_pb2, controller_pb2_grpc, raft_pb2
from penstock.wire.errors import ErrorCode
from tests.absurd import absurd
from tests.support import wait_until

CLUSTER = "hostile"
GARBAGE = b"\xff\xff\xff"
SERVICE = controller_pb2.DESCRIPTOR.services_by_name["Controller"]
EXCHANGE = raft_pb2.DESCRIPTOR.services_by_name["Raft"].methods_by_name["Exchange"]
METHODS = {method.name: method for method in SERVICE.methods}
CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # A stream that goes on for as long as one listens.
    grpc.StatusCode.CANCELLED,
}
WAIT_S = 0.3


class Controller:
    """A controller that is alone, and leads. The test is whoever it likes."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.server = ControllerServer(
            ControllerConfig(
                may_found=True,
                node_id=1,
                cluster_id=CLUSTER,
                data_dir=directory,
                listen=("127.0.0.1", 0),
                voters={1: ("127.0.0.1", 0)},
                election_timeout_min_ms=50,
                election_timeout_max_ms=100,
                raft_heartbeat_ms=10,
            )
        )
        self.runner.run(self._start())

    async def _start(self) -> None:
        await self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}")

    def call(self, method: Any, *requests: bytes) -> tuple[grpc.StatusCode, str]:
        """How a call ends that sends these bytes."""
        return self.runner.run(asyncio.to_thread(self._call, method, requests))

    def _call(self, method: Any, requests: tuple[bytes, ...]) -> tuple[grpc.StatusCode, str]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind = {
            (False, False): "unary_unary",
            (False, True): "unary_stream",
            (True, False): "stream_unary",
            (True, True): "stream_stream",
        }[method.client_streaming, method.server_streaming]
        ask = getattr(self.channel, kind)(path)
        what = iter(requests) if method.client_streaming else requests[0]
        try:
            answer = ask(what, timeout=5 if kind == "unary_unary" else WAIT_S)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def commits(self) -> bool:
        """Whether it still does its work."""
        command = cluster_pb2.Command(delete_topic={"name": "no-such-topic"})
        request = controller_pb2.ExecuteAdminRequest(command=command)
        stub = controller_pb2_grpc.ControllerStub(self.channel)
        answer = self.runner.run(asyncio.to_thread(stub.ExecuteAdmin, request, timeout=10))
        # The refusal of who applied it: it was committed.
        is_applied = answer.result.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return is_applied and not self.server.wait_failed().done()

    def close(self) -> None:
        self.channel.close()
        self.runner.run(self.server.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    found = Controller(tmp_path_factory.mktemp("hostile"))
    wait_until(found.commits, "it leads", 20)
    yield found
    found.close()


def test_every_method_says_whom_it_serves() -> None:
    # A new one must be entered among those that check their speaker, or here.
    reading = {"DescribeController", "DescribeQuorum", "ReadControllerMetrics"}
    any_node = {"AlterVoters", "ExecuteAdmin", *reading}
    assert set(METHODS) == controller._SPEAKERS.keys() | any_node


@pytest.mark.parametrize("name", [*METHODS, "Exchange"])
def test_bytes_that_are_no_message_are_the_senders_mistake(
    alone: Controller, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS.get(name, EXCHANGE)
    code, details = alone.call(method, GARBAGE)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert "no message of this method; send what penstock.v1 describes" in details
    assert not caplog.records


FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", [*METHODS, "Exchange"])
def test_any_bytes_are_answered_clearly(
    alone: Controller, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS.get(name, EXCHANGE)

    @settings(FUZZ, max_examples=20 if method.server_streaming else 60)
    @given(st.lists(st.binary(max_size=64), min_size=1, max_size=3))
    def check(requests: list[bytes]) -> None:
        code, details = alone.call(method, *requests)
        assert code in CLEAR, (code, details)

    check()
    assert not [record for record in caplog.records if record.exc_info]
    assert alone.commits()


@pytest.mark.parametrize("name", [*METHODS, "Exchange"])
def test_absurd_messages_are_answered_clearly(
    alone: Controller, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS.get(name, EXCHANGE)

    @settings(FUZZ, max_examples=20 if method.server_streaming else 150)
    @given(st.lists(absurd(method.input_type), min_size=1, max_size=3))
    def check(requests: list[Any]) -> None:
        code, details = alone.call(method, *(each.SerializeToString() for each in requests))
        assert code in CLEAR, (code, details)

    check()
    assert not [record for record in caplog.records if record.exc_info]
    assert alone.commits()


HOSTS = st.one_of(
    st.sampled_from(["127.0.0.1", "::1", "unix:/x", "dns:///x", "[", "a b", "\x00", "x" * 70_000]),
    st.text(max_size=20),
)


def sound_hello(node_id: int = 2, host: str = "127.0.0.1", port: int = 1) -> raft_pb2.RaftHello:
    return raft_pb2.RaftHello(
        cluster_id=CLUSTER,
        node_id=node_id,
        receiver_node_id=1,
        directory_id=bytes(DIRECTORY_ID_BYTES),
        host=host,
        port=port,
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GARBAGE,
        cluster_pb2.ClusterSnapshot(metadata_version=1_000_000).SerializeToString(),
        cluster_pb2.ClusterSnapshot(
            metadata_version=1,
            metadata={"partitions": [{"topic_id": b"no topic's", "partition": -1}]},
        ).SerializeToString(),
    ],
    ids=["nothing", "no message", "of the far future", "partitions of no topic"],
)
def test_a_snapshot_of_nonsense_after_a_sound_hello_is_borne(
    alone: Controller, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = raft_pb2.SnapshotChunk(
        last_index=2**40,
        last_term=1,
        total_bytes=len(data),
        crc32c=Snapshot(2**40, 1, data).crc,
        data=data,
    )
    sent = [
        raft_pb2.RaftExchangeRequest(hello=sound_hello()),
        raft_pb2.RaftExchangeRequest(
            term=alone.server.status().term + 1,
            directory_id=bytes(DIRECTORY_ID_BYTES),
            snapshot_chunk=chunk,
        ),
    ]
    code, details = alone.call(EXCHANGE, *(each.SerializeToString() for each in sent))
    assert code in CLEAR, (code, details)
    wait_until(alone.commits, "it leads, or leads again", 20)
    assert alone.server.status().commit_index < 2**40


def test_whatever_follows_a_sound_hello_is_borne(
    alone: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    @FUZZ
    @given(
        st.integers(2, 2**31 - 1),
        HOSTS,
        st.integers(-(2**31), 2**31 - 1),
        st.lists(absurd(raft_pb2.RaftExchangeRequest.DESCRIPTOR), max_size=6),
    )
    def check(node_id: int, host: str, port: int, messages: list[Any]) -> None:
        hello = raft_pb2.RaftExchangeRequest(hello=sound_hello(node_id, host, port))
        sent = [hello, *messages]
        code, details = alone.call(EXCHANGE, *(each.SerializeToString() for each in sent))
        assert code in CLEAR, (code, details)

    check()
    assert not [record for record in caplog.records if record.exc_info]
    wait_until(alone.commits, "it leads, or leads again", 20)
