"""How a controller's node is, asked through a broker: real gRPC, a quorum as scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from penstock.broker.service.controller_facts import ControllerFacts
from penstock.v1 import controller_pb2, controller_pb2_grpc, node_pb2
from penstock.wire.errors import (
    NetworkError,
    NotControllerError,
    UnknownVoterError,
    UnsupportedVersionError,
)


class Quorum:
    """Knows where controller 101 votes and 102 is about to."""

    def __init__(self, port: int) -> None:
        voter = controller_pb2.QuorumVoter(node_id=101, host="127.0.0.1", port=port)
        comes = controller_pb2.QuorumVoter(node_id=102, host="127.0.0.1", port=port)
        self.told = controller_pb2.DescribeQuorumResponse(voters=[voter], catching_up=comes)
        self.failure: Exception | None = None

    async def describe_quorum(self, timeout_ms: int) -> controller_pb2.DescribeQuorumResponse:
        if self.failure is not None:
            raise self.failure
        return self.told


class Controller(controller_pb2_grpc.ControllerServicer):
    async def DescribeController(self, request: Any, context: Any) -> Any:
        node = node_pb2.DescribeNodeResponse(node_id=101, version="0.2")
        return controller_pb2.DescribeControllerResponse(node=node)

    async def ReadControllerMetrics(self, request: Any, context: Any) -> Any:
        metrics = node_pb2.ReadMetricsResponse(node_id=101, text="penstock_probe 1.0\n")
        return controller_pb2.ReadControllerMetricsResponse(metrics=metrics)


@asynccontextmanager
async def controller(
    servicer: controller_pb2_grpc.ControllerServicer | None,
) -> AsyncIterator[tuple[ControllerFacts, Quorum, aio.Server]]:
    server = aio.server()
    if servicer is not None:
        controller_pb2_grpc.add_ControllerServicer_to_server(servicer, server)
    quorum = Quorum(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        facts = ControllerFacts(quorum, lambda address, _node_id: aio.insecure_channel(address))
        yield facts, quorum, server
    finally:
        await server.stop(None)


async def test_a_controller_is_asked_where_the_quorum_says_it_is() -> None:
    async with controller(Controller()) as (facts, _, _server):
        assert (await facts.describe(101)).version == "0.2"
        assert (await facts.read_metrics(101)).text == "penstock_probe 1.0\n"
        assert (await facts.describe(102)).version == "0.2"


async def test_a_node_that_is_no_controller_is_refused_with_those_that_are() -> None:
    async with controller(Controller()) as (facts, _, _server):
        with pytest.raises(UnknownVoterError, match="controllers are 101, 102; next: name one"):
            await facts.describe(7)


async def test_software_that_does_not_tell_is_said_to_be_old() -> None:
    async with controller(None) as (facts, _, _server):
        with pytest.raises(UnsupportedVersionError, match="controller 101 is too old"):
            await facts.describe(101)


async def test_a_controller_that_does_not_answer_is_named_with_its_address() -> None:
    async with controller(Controller()) as (facts, quorum, server):
        await server.stop(None)
        port = quorum.told.voters[0].port
        with pytest.raises(NetworkError, match=f"101 does not answer at 127.0.0.1:{port}"):
            await facts.read_metrics(101)


async def test_nobody_is_asked_while_nobody_says_who_the_controllers_are() -> None:
    async with controller(Controller()) as (facts, quorum, _server):
        quorum.failure = NotControllerError("an election")
        with pytest.raises(NotControllerError):
            await facts.describe(101)
