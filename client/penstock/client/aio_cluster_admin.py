"""Administration of the cluster as a whole: controllers, settings, brokers, feature level."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import cast

from penstock.client import admin_values, arguments
from penstock.client.admin_calls import READ_MS, AdminCalls, raise_if_error
from penstock.client.descriptions import ConfigEntry, QuorumDescription
from penstock.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, controller_pb2
from penstock.wire.errors import BrokerIdNotRegisteredError, PenstockError, UnknownVoterError

ConfigValue = str | int | float
"""The value of a config. Numbers, True and False are written as the cluster knows them."""


class ClusterAdmin(AdminCalls):
    """A part of AsyncAdminClient."""

    async def describe_quorum(self) -> QuorumDescription:
        """How the controllers stand."""

        def judge(response: admin_pb2.AdminDescribeQuorumResponse) -> QuorumDescription:
            raise_if_error(response)
            return admin_values.quorum(response.quorum)

        request = admin_pb2.AdminDescribeQuorumRequest()
        return cast(
            QuorumDescription,
            await self._ask("DescribeQuorum", request, judge, stub=admin_pb2_grpc.AdminStub),
        )

    async def add_voter(self, node_id: int, address: str) -> QuorumDescription:
        """Make a controller a voter. See ``AdminClient.add_voter``."""
        host, port = arguments.address("address", address)
        node_id = arguments.whole_number("node_id", node_id, 0, 2**31 - 1)
        voter = controller_pb2.QuorumVoter(node_id=node_id, host=host, port=port)
        # Safe to repeat: a voter that is one already is answered as one that was added.
        return await self._alter_quorum(admin_pb2.AlterQuorumRequest(add=voter))

    async def remove_voter(self, node_id: int) -> QuorumDescription:
        """Make a controller no voter. See ``AdminClient.remove_voter``."""
        node_id = arguments.whole_number("node_id", node_id, 0, 2**31 - 1)
        before = {voter.node_id for voter in (await self.describe_quorum()).voters}

        async def is_gone(error: PenstockError) -> bool:
            return isinstance(error, UnknownVoterError) and node_id in before

        request = admin_pb2.AlterQuorumRequest(remove_node_id=node_id)
        return await self._alter_quorum(request, is_gone)

    async def _alter_quorum(
        self,
        request: admin_pb2.AlterQuorumRequest,
        took_effect: Callable[[PenstockError], Awaitable[bool]] | None = None,
    ) -> QuorumDescription:
        def judge(response: admin_pb2.AlterQuorumResponse) -> QuorumDescription:
            raise_if_error(response)
            return admin_values.quorum(response.quorum)

        changed: QuorumDescription | None = await self._ask(
            "AlterQuorum", request, judge, stub=admin_pb2_grpc.AdminStub, took_effect=took_effect
        )
        return changed or await self.describe_quorum()

    async def describe_node_configs(self, node_id: int | None = None) -> list[ConfigEntry]:
        """The settings of a node. See ``AdminClient.describe_node_configs``."""
        request = admin_pb2.DescribeNodeConfigsRequest()
        told = await self._ask_node(node_id, "DescribeNodeConfigs", request, READ_MS)
        return [admin_values.config(entry) for entry in told.entries]

    async def alter_cluster_configs(
        self,
        set_configs: Mapping[str, ConfigValue] | None = None,
        remove: Iterable[str] = (),
        *,
        validate_only: bool = False,
    ) -> None:
        """Set and reset shared settings. See ``AdminClient.alter_cluster_configs``."""
        change = cluster_pb2.AlterClusterConfigsCommand(
            set=arguments.configs({} if set_configs is None else set_configs, "set_configs"),
            remove=arguments.texts("remove", remove, "configs' names"),
            validate_only=arguments.flag("validate_only", validate_only),
        )
        request = admin_pb2.AlterClusterConfigsRequest(change=change)
        await self._ask(
            "AlterClusterConfigs", request, raise_if_error, stub=admin_pb2_grpc.AdminStub
        )

    async def unregister_broker(self, node_id: int) -> None:
        """Forget a broker for good. See ``AdminClient.unregister_broker``."""
        wanted = arguments.whole_number("node_id", node_id, 0, arguments.MAX_INT32)
        known = {broker.node_id for broker in (await self.describe_cluster()).brokers}

        async def is_gone(error: PenstockError) -> bool:
            return isinstance(error, BrokerIdNotRegisteredError) and wanted in known

        await self._ask(
            "UnregisterBroker",
            admin_pb2.UnregisterBrokerRequest(node_id=wanted),
            raise_if_error,
            stub=admin_pb2_grpc.AdminStub,
            took_effect=is_gone,
            # Said of the broker named; it is retriable where a broker hears it of itself.
            final=(BrokerIdNotRegisteredError,),
        )

    async def raise_metadata_version(self, version: int | None = None) -> int:
        """Raise the feature level. See ``AdminClient.raise_metadata_version``."""
        wanted = 0 if version is None else arguments.whole_number("version", version, 1, 2**31 - 1)
        request = admin_pb2.RaiseMetadataVersionRequest(metadata_version=wanted)

        def judge(response: admin_pb2.RaiseMetadataVersionResponse) -> int:
            raise_if_error(response)
            return response.metadata_version

        return cast(
            int,
            await self._ask("RaiseMetadataVersion", request, judge, stub=admin_pb2_grpc.AdminStub),
        )
