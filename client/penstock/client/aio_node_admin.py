"""Administration of single nodes: draining one, and what it says of itself."""

from __future__ import annotations

from typing import Any, Final, cast

from penstock.client import admin_values, arguments
from penstock.client.admin_calls import AdminCalls, checked, raise_if_error
from penstock.client.descriptions import NodeDescription
from penstock.v1 import admin_pb2, admin_pb2_grpc, node_pb2
from penstock.wire.errors import BrokerIdNotRegisteredError, NetworkError, UnknownVoterError

NODE_MS: Final = 5_000.0
"""A node that measures its disks answers within two seconds, whatever these do."""


class NodeAdmin(AdminCalls):
    """A part of AsyncAdminClient."""

    async def drain_broker(self, node_id: int, *, undo: bool = False) -> int:
        """Hand a broker's leaderships over. See ``AdminClient.drain_broker``."""
        wanted = arguments.whole_number("node_id", node_id, 0, arguments.MAX_INT32)

        def judge(response: admin_pb2.DrainBrokerResponse) -> int:
            raise_if_error(response)
            return response.remaining_leaderships

        return cast(
            int,
            # Safe to repeat: to drain a drained broker changes nothing.
            await self._ask(
                "DrainBroker",
                admin_pb2.DrainBrokerRequest(node_id=wanted, undo=arguments.flag("undo", undo)),
                judge,
                stub=admin_pb2_grpc.AdminStub,
                # Said of the broker named; it is retriable where a broker hears it of itself.
                final=(BrokerIdNotRegisteredError,),
            ),
        )

    async def describe_node(self, node_id: int | None = None) -> NodeDescription:
        """How a node is. See ``AdminClient.describe_node``."""
        request = node_pb2.DescribeNodeRequest()
        return admin_values.node(await self._ask_any_node(node_id, "DescribeNode", request))

    async def read_metrics(self, node_id: int | None = None) -> str:
        """The metrics of a node. See ``AdminClient.read_metrics``."""
        request = node_pb2.ReadMetricsRequest()
        told = await self._ask_any_node(node_id, "ReadMetrics", request)
        return cast(str, told.text)

    async def _ask_any_node(self, node_id: int | None, method: str, request: Any) -> Any:
        """A broker at its advertised address; a node that is none through one, as a controller."""
        try:
            return await self._ask_node(node_id, method, request, NODE_MS)
        except BrokerIdNotRegisteredError as error:
            no_broker = error
        request.controller_id = node_id
        try:
            told = await self._ask(
                method,
                request,
                checked,
                stub=admin_pb2_grpc.AdminStub,
                # A broker has tried: whoever asks how a node is wants to hear that it is silent.
                final=(NetworkError,),
            )
        except UnknownVoterError as error:
            raise BrokerIdNotRegisteredError(
                f"{no_broker.message}, or a controller: {error.message}"
            ) from None
        if told.node_id != node_id:
            # A broker of older software does not know controller_id, and tells of itself.
            raise no_broker
        return told
