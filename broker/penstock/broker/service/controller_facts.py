"""How a controller's node is, asked for tools: they do not reach the controllers' port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import grpc
from grpc import aio

from penstock.v1 import controller_pb2, node_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.errors import (
    NetworkError,
    UnknownVoterError,
    UnsupportedVersionError,
)
from penstock.wire.transport import format_address

if TYPE_CHECKING:
    # The type stubs know it, the generated module does not.
    from penstock.v1.controller_pb2_grpc import ControllerAsyncStub

_QUORUM_MS: Final = 1_500
_ANSWER_S: Final = 3.0
"""A node that measures its disks answers within two seconds, whatever these do."""

Response = TypeVar("Response")


class QuorumTold(Protocol):
    """What is asked of the broker's link to the controllers."""

    async def describe_quorum(self, timeout_ms: int) -> controller_pb2.DescribeQuorumResponse:
        """How the controllers stand."""
        ...


class ControllerFacts:
    """Asks single controllers. Used on one event loop.

    Where a controller is, the quorum says each time. Raises UnknownVoterError for a node that is
    none, UnsupportedVersionError for one whose software does not tell, NetworkError for one that
    does not answer, and what ``describe_quorum`` raises.
    """

    def __init__(self, quorum: QuorumTold, open_channel: Callable[[str, int], aio.Channel]) -> None:
        self._quorum = quorum
        self._open_channel = open_channel

    async def describe(self, node_id: int) -> node_pb2.DescribeNodeResponse:
        """What the controller says of its node."""
        request = controller_pb2.DescribeControllerRequest()
        answer = await self._ask(
            node_id, lambda stub: stub.DescribeController(request, timeout=_ANSWER_S)
        )
        return answer.node

    async def read_metrics(self, node_id: int) -> node_pb2.ReadMetricsResponse:
        """The metrics of the controller's node."""
        request = controller_pb2.ReadControllerMetricsRequest()
        answer = await self._ask(
            node_id, lambda stub: stub.ReadControllerMetrics(request, timeout=_ANSWER_S)
        )
        return answer.metrics

    async def _ask(
        self, node_id: int, call: Callable[[ControllerAsyncStub], Awaitable[Response]]
    ) -> Response:
        address = await self._address(node_id)
        channel = self._open_channel(address, node_id)
        try:
            # The generated stub serves both kinds of channel; only its type tells them apart.
            return await call(cast("Any", ControllerStub(channel)))
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise UnsupportedVersionError(
                    f"the software of controller {node_id} is too old to say how its node is; "
                    "next: upgrade it"
                ) from None
            raise NetworkError(
                f"controller {node_id} does not answer at {address}: {error.code().name}: "
                f"{error.details()}; next: see whether it runs, and the way there from the brokers"
            ) from None
        finally:
            await asyncio.shield(channel.close(None))

    async def _address(self, node_id: int) -> str:
        quorum = await self._quorum.describe_quorum(_QUORUM_MS)
        known = list(quorum.voters)
        if quorum.HasField("catching_up"):
            known.append(quorum.catching_up)
        for one in known:
            if one.node_id == node_id:
                return format_address(one.host, one.port)
        controllers = ", ".join(str(one.node_id) for one in known)
        raise UnknownVoterError(
            f"node {node_id} is no controller; the controllers are {controllers}; next: name one "
            "of these"
        )
