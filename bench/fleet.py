"""Dedicated controllers (real nodes) and simulated brokers, each a process, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc
from children import HOST, Answer, Child, free_ports

from penstock.broker.datadir import format_directory
from penstock.v1 import controller_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.transport import CHANNEL_OPTIONS, format_address, quiet_grpc

CLUSTER_ID: Final = "bench"
FIRST_BROKER: Final = 11
_PATIENCE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.002
_STOP_SECONDS: Final = 20.0

T = TypeVar("T")


class Fleet:
    """Three controllers and some brokers. Use as a context manager; not safe between threads."""

    def __init__(self, directory: Path, *, brokers: int, controllers: int = 3) -> None:
        quiet_grpc()
        self._directory = directory
        self.ports = dict(enumerate(free_ports(controllers), start=1))
        self.broker_ids = list(range(FIRST_BROKER, FIRST_BROKER + brokers))
        self.brokers: dict[int, Child] = {}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, grpc.Channel] = {}

    def __enter__(self) -> Fleet:
        try:
            for node in self.ports:
                self.start_controller(node)
            for node in self.broker_ids:
                self.start_broker(node)
            for broker in self.brokers.values():
                broker.ask("unfenced", nodes=self.broker_ids)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for broker in self.brokers.values():
            broker.stop()
        for node in list(self._nodes):
            self.stop_controller(node)

    # Controllers.

    def start_controller(self, node_id: int) -> None:
        """Start a node that is a controller alone."""
        directory = self._directory / f"controller-{node_id}"
        format_directory(directory, CLUSTER_ID, node_id, may_found=True)
        voters = ",".join(f"{node}@{HOST}:{port}" for node, port in self.ports.items())
        config = directory / "node.toml"
        settings = {
            "node.id": node_id,
            "node.roles": "controller",
            "data.dir": str(directory),
            "controller.listen": format_address(HOST, self.ports[node_id]),
            "controller.quorum.voters": voters,
        }
        config.write_text("".join(f"{key} = {json.dumps(it)}\n" for key, it in settings.items()))
        with (directory / "node.log").open("ab") as output:
            # It ends with us: that is what the pipe is for.
            self._nodes[node_id] = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.child", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def controller_pid(self, node_id: int) -> int:
        """The process of a controller."""
        return self._nodes[node_id].pid

    def kill_controller(self, node_id: int) -> float:
        """SIGKILL; the time of it."""
        process = self._nodes.pop(node_id)
        at_s = time.monotonic()
        process.kill()
        process.wait()
        return at_s

    def stop_controller(self, node_id: int) -> None:
        """Have a controller end as an operator would."""
        process = self._nodes.pop(node_id)
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def quorum(self, node_id: int) -> controller_pb2.DescribeQuorumResponse:
        """The quorum as a controller sees it. Raises grpc.RpcError."""
        if node_id not in self._channels:
            address = format_address(HOST, self.ports[node_id])
            self._channels[node_id] = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        stub: Any = ControllerStub(self._channels[node_id])
        answer: controller_pb2.DescribeQuorumResponse = stub.DescribeQuorum(
            controller_pb2.DescribeQuorumRequest(), timeout=5
        )
        return answer

    def active_controller(self) -> int:
        """Who all controllers agree leads, once all of them live and agree."""

        def agreed() -> int:
            with contextlib.suppress(grpc.RpcError):
                leaders = {self.quorum(node).leader_id for node in self.ports}
                if len(leaders) == 1:
                    return leaders.pop()
            return -1

        return wait_for(agreed, lambda leader: leader > 0, "one leader that all know")

    def wait_applied(self, node_id: int, index: int) -> float:
        """When a controller has applied the log up to an index."""

        def applied() -> int:
            with contextlib.suppress(grpc.RpcError):
                return self.quorum(node_id).applied_index
            return -1

        wait_for(applied, lambda reached: reached >= index, f"controller {node_id} to catch up")
        return time.monotonic()

    # Brokers.

    def start_broker(self, node_id: int) -> None:
        """Start a simulated broker."""
        voters = {node: [HOST, port] for node, port in self.ports.items()}
        settings: Answer = {"node_id": node_id, "cluster_id": CLUSTER_ID, "voters": voters}
        log = self._directory / f"broker-{node_id}.log"
        self.brokers[node_id] = Child("simulated_broker.py", settings, log)

    def kill_broker(self, node_id: int) -> float:
        """SIGKILL; the time of it."""
        at_s = time.monotonic()
        self.brokers[node_id].kill()
        return at_s

    def ask_all(self, brokers: Sequence[int], what: str, **arguments: object) -> list[Answer]:
        """Ask brokers at the same time; the answers of all."""
        for node in brokers:
            self.brokers[node].tell(what, **arguments)
        return [self.brokers[node].answer() for node in brokers]

    def address(self, node_id: int) -> str:
        """Where a controller listens."""
        return format_address(HOST, self.ports[node_id])


def wait_for(ask: Callable[[], T], good: Callable[[T], bool], what: str) -> T:
    """Ask until the answer is good; the benchmark ends when that takes too long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not good(answer := ask()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_PATIENCE_SECONDS:.0f} s in vain for {what}")
        time.sleep(_POLL_SECONDS)
    return answer
