"""The ports that clients are served on: broker.listen, and external.listen for those from outside.

Both have the same services by the same limits and TLS. What is for nodes alone is added to the
first by the broker itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.broker.config import NodeConfig
from penstock.broker.coordinator.service import GroupsServicer
from penstock.broker.service.admin import AdminServicer
from penstock.broker.service.health import HealthServicer
from penstock.broker.service.limits import client_port_options
from penstock.broker.service.log import LogServicer, add_log_servicer
from penstock.broker.service.metadata import MetadataServicer
from penstock.broker.service.taken import Taken
from penstock.broker.service.transactions import TransactionsServicer
from penstock.broker.service.unsent import Unsent
from penstock.raft_meta.arriving import Arrivals
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.exposure import is_loopback
from penstock.raft_meta.guarding import Guarded
from penstock.raft_meta.listening import bind
from penstock.raft_meta.metering import Meter
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    groups_pb2,
    groups_pb2_grpc,
    log_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.transport import parse_address

log = structlog.get_logger()

SERVED_TO_CLIENTS: Final = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (log_pb2, "Log"),
        (metadata_pb2, "Metadata"),
        (groups_pb2, "Groups"),
        (transactions_pb2, "Transactions"),
        (admin_pb2, "Admin"),
        (health_pb2, "Health"),
    )
)
"""The services of every port for clients, by their full names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientServices:
    """What answers clients, whichever port they come to."""

    log: LogServicer
    metadata: MetadataServicer
    groups: GroupsServicer
    transactions: TransactionsServicer
    admin: AdminServicer
    health: HealthServicer


def client_server(
    config: NodeConfig,
    services: ClientServices,
    meter: Meter,
    *,
    unsent: Unsent,
    arrivals: Arrivals,
    tell: Callable[[Any], Any] | None = None,
    beside: Sequence[str] = (),
) -> aio.Server:
    """A server with all that clients are served with, which does not listen yet.

    Answers go out as ``tell`` makes them, and are counted by ``unsent``, requests by ``arrivals``.
    ``beside`` names services that the caller adds.
    """
    server = aio.server(options=client_port_options(config))
    # Not all of a server: what the generated code calls.
    guarded: Any = Guarded(server, meter=meter, tell=tell, arrivals=arrivals)
    add_log_servicer(services.log, guarded)
    guarded = Taken(guarded, unsent, tell, services.metadata.answers.encoded)
    metadata_pb2_grpc.add_MetadataServicer_to_server(services.metadata, guarded)
    groups_pb2_grpc.add_GroupsServicer_to_server(services.groups, guarded)
    transactions_pb2_grpc.add_TransactionsServicer_to_server(services.transactions, guarded)
    admin_pb2_grpc.add_AdminServicer_to_server(services.admin, guarded)
    health_pb2_grpc.add_HealthServicer_to_server(services.health, server)
    names = [*SERVED_TO_CLIENTS, *beside, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    return server


async def open_port(
    server: aio.Server, config: NodeConfig, tls: NodeTls | None, *, setting: str, address: str
) -> int:
    """Have a server of clients listen on ``address``, which is that of ``setting``; the port.

    Raises AddressInUseError.
    """
    listen = parse_address(address)
    if tls is None and not is_loopback(listen[0]):
        log.warning(
            "whoever reaches this broker may read, write and delete everything",
            address=address,
            next_step="set tls.ca, tls.certificate and tls.key, or see that the network keeps "
            "strangers out",
        )
    port = bind(
        server,
        listen,
        setting=setting,
        tls=tls,
        client_certificates=config.tls_client_auth == "required",
    )
    await server.start()
    log.info("listening", address=address, setting=setting, tls=tls is not None)
    return port
