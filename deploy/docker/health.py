"""Whether the node of this container serves, as its health check asks: exit status 0, or 1 and why.

With metrics.listen it is asked there, at /readyz. Without, a node that is a broker is asked by
gRPC's health protocol, and one that is a controller alone by a connection. It reads the same
settings as the node: /etc/penstock/node.toml and the environment.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.broker.config import NodeConfig
from penstock.wire.errors import ConfigurationError
from penstock.wire.transport import parse_address

SETTINGS = Path("/etc/penstock/node.toml")
ANSWER_S = 5.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where it is asked, not bound.


def why_not(config: NodeConfig) -> str:
    """Why it does not serve; empty when it does."""
    if config.metrics_listen:
        return why_not_ready(*parse_address(config.metrics_listen))
    is_broker = "broker" in config.roles
    listen = config.broker_listen if is_broker else config.controller_listen
    host, port = parse_address(listen)
    host = EVERYWHERE.get(host, host)
    if not is_broker or config.tls_certificate:
        # Under TLS the port wants a certificate of those who ask: that it is open is all we see.
        try:
            socket.create_connection((host, port), ANSWER_S).close()
        except OSError as error:
            return f"{listen} is not open: {error}"
        return ""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=ANSWER_S
            )
        except grpc.RpcError as error:
            return f"the broker does not answer at {listen}: {error.code().name}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else f"it is {name}"


def why_not_ready(host: str, port: int) -> str:
    """What the node itself says at /readyz."""
    connection = http.client.HTTPConnection(EVERYWHERE.get(host, host), port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"the node does not answer at port {port}: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if answer.status == http.HTTPStatus.OK else text


def main() -> int:
    """The exit status."""
    try:
        reason = why_not(NodeConfig.load(SETTINGS, os.environ))
    except ConfigurationError as error:
        reason = str(error)
    sys.stdout.write(f"{reason or 'it serves'}\n")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
