"""The standard gRPC health service: whether this broker may serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_STATUS = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # It has no types.
    """Answers SERVING while the controllers know this broker as alive, for every service.

    A broker that starts, is fenced or has lost contact with the controllers is NOT_SERVING: it
    refuses clients until that is over. Watch is not offered: probes ask again anyway.
    """

    def __init__(self, may_serve: Callable[[], bool]) -> None:
        self._may_serve = may_serve

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Say whether it serves now."""
        return _STATUS(status=_STATUS.SERVING if self._may_serve() else _STATUS.NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Refused, as the health protocol allows."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this broker offers Check; ask it again instead"
        )
