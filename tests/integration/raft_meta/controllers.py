"""Real controllers as processes on loopback, and how tests speak to them."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from grpc import aio

from penstock.v1 import cluster_pb2, controller_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.transport import CHANNEL_OPTIONS
from tests.integration.ports import free_ports

CLUSTER_ID = "integration"
T = TypeVar("T")
RUNNER = Path(__file__).with_name("run_controller.py")
OLD_RUNNER = Path(__file__).with_name("run_old_controller.py")
"""Of software that knows no metadata.version but the oldest."""


async def until(
    ask: Callable[[], Awaitable[T] | T], good: Callable[[T], bool] = bool, seconds: float = 15.0
) -> T:
    """Ask again and again until the answer is good; refused connections are no answer.

    At least one question is put after the time is over: a machine that stood still tells nothing.
    """
    deadline = time.monotonic() + seconds
    answer: object = None
    is_last = False
    while not is_last:
        is_last = time.monotonic() >= deadline
        try:
            answer = ask()
            if inspect.isawaitable(answer):
                answer = await answer
            if good(answer):
                return answer
        except aio.AioRpcError as error:
            answer = error.details()
        await asyncio.sleep(0.01)  # Paces the asking, under the deadline above.
    raise AssertionError(f"not within {seconds} s; last: {answer}")


class Controllers:
    """Voters 1..n, each a process. ``kill`` is kill -9."""

    def __init__(self, directory: Path, count: int, *, cluster_id: str = CLUSTER_ID) -> None:
        self.directory = directory
        self.cluster_id = cluster_id
        self.ports = dict(zip(range(1, count + 1), free_ports(count), strict=True))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, aio.Channel] = {}

    def start(self, *nodes: int, runner: Path = RUNNER, **settings: object) -> None:
        for node in nodes or self.ports:
            config = {
                "node_id": node,
                "cluster_id": self.cluster_id,
                "data_dir": str(self.directory / f"node-{node}"),
                "listen": ["127.0.0.1", self.ports[node]],
                "voters": {str(n): ["127.0.0.1", port] for n, port in self.ports.items()},
                **settings,
            }
            output = (self.directory / f"node-{node}.log").open("ab")
            self.processes[node] = subprocess.Popen(
                [sys.executable, str(runner), json.dumps(config)], stdout=output, stderr=output
            )
            output.close()

    def kill(self, *nodes: int) -> None:
        for node in nodes or list(self.processes):
            self.processes[node].send_signal(signal.SIGKILL)
        for node in nodes or list(self.processes):
            self.processes.pop(node).wait()

    def stop(self, *nodes: int) -> None:
        for node in nodes or list(self.processes):
            self.processes[node].send_signal(signal.SIGTERM)
        for node in nodes or list(self.processes):
            assert self.processes.pop(node).wait(timeout=15) == 0

    def log(self, node: int) -> str:
        return (self.directory / f"node-{node}.log").read_text()

    def stub(self, node: int) -> ControllerStub:
        if node not in self._channels:
            address = f"127.0.0.1:{self.ports[node]}"
            self._channels[node] = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return ControllerStub(self._channels[node])

    async def quorum(self, node: int) -> controller_pb2.DescribeQuorumResponse:
        request = controller_pb2.DescribeQuorumRequest()
        return await self.stub(node).DescribeQuorum(request, timeout=2)

    async def active(self, seconds: float = 15.0) -> int:
        """The controller that carries out commands now, once every process answers."""
        for node in self.processes:
            await until(lambda node=node: self.quorum(node), lambda _answer: True, seconds)

        async def ask() -> int:
            for node in list(self.processes):
                try:
                    # Not a topic, so it changes nothing; only the active one gets that far.
                    result = await self.admin(
                        node, cluster_pb2.Command(delete_topic={"name": "no-such-topic"})
                    )
                except aio.AioRpcError:
                    continue
                if result.error.code == 3:
                    return node
            return 0

        return await until(ask, seconds=seconds)

    async def admin(self, node: int, command: cluster_pb2.Command) -> cluster_pb2.CommandResult:
        request = controller_pb2.ExecuteAdminRequest(command=command)
        return (await self.stub(node).ExecuteAdmin(request, timeout=5)).result

    async def watch(self, node: int) -> AsyncIterator[controller_pb2.WatchMetadataResponse]:
        request = controller_pb2.WatchMetadataRequest(cluster_id=self.cluster_id, node_id=99)
        async for response in self.stub(node).WatchMetadata(request):
            yield response

    async def metadata(self, node: int) -> cluster_pb2.MetadataDelta:
        """All that one controller has applied."""
        async for response in self.watch(node):
            return response.delta
        raise AssertionError("the stream ended")

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()  # type: ignore[call-arg]  # The stubs want more.
        self.kill()


def registration(node_id: int, incarnation: bytes = b"") -> controller_pb2.RegisterBrokerRequest:
    return controller_pb2.RegisterBrokerRequest(
        registration=cluster_pb2.RegisterBrokerCommand(
            node_id=node_id,
            incarnation_id=incarnation or bytes([node_id]) * 16,
            cluster_id=CLUSTER_ID,
            host="127.0.0.1",
            port=9000 + node_id,
            previous_broker_epoch=-1,
        )
    )
