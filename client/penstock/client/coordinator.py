"""Finding the broker that coordinates a group or a transactional id, and asking it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from penstock.client.cluster import Cluster, now_ms
from penstock.client.core.metadata_cache import Broker
from penstock.client.core.stall_reasons import reason_of
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    LeaderHint,
    NetworkError,
    NotCoordinatorError,
    PenstockError,
    RequestTimedOutError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)

LOOK_AGAIN = (NotCoordinatorError, CoordinatorNotAvailableError, NetworkError, RequestTimedOutError)
"""Errors after which another broker may be the coordinator."""
_UNANSWERED_MS = 1_000.0
"""What is only not answered yet is no trouble until it has taken so long."""
_NO_SUCH_TOPIC = (UnknownTopicOrPartitionError, UnknownTopicIdError)


class Kind(Enum):
    """What is coordinated; the value is how messages name it."""

    GROUP = "group"
    TRANSACTION = "transactional id or commit group"


_TYPES = {
    Kind.GROUP: metadata_pb2.COORDINATOR_TYPE_GROUP,
    Kind.TRANSACTION: metadata_pb2.COORDINATOR_TYPE_TRANSACTION,
}


@dataclass(slots=True)
class _Call:
    """A question to a coordinator, from its beginning to its good answer or its failure."""

    key: str
    what: str
    since_ms: float
    refusal: PenstockError | None = None  # The last one.

    def trouble(self, kind: Kind) -> PenstockError | None:
        waited_ms = now_ms() - self.since_ms
        if self.refusal is None and waited_ms < _UNANSWERED_MS:
            return None
        answer = "no answer yet" if self.refusal is None else f"last answer: {self.refusal}"
        error = (NetworkError if self.refusal is None else type(self.refusal))(
            f"the coordinator of {kind.value} {self.key!r} has been asked for "
            f"{waited_ms / 1000:.1f} s ({self.what}; {answer})"
        )
        error.reason = reason_of(error if self.refusal is None else self.refusal)
        error.__cause__ = self.refusal
        return error


class Coordinators:
    """Which broker coordinates which key of one kind, as far as known. Belongs to one event loop.

    The key is a group's id, or the ``coordinating_key`` of a transactional id.
    """

    def __init__(self, cluster: Cluster, kind: Kind = Kind.GROUP) -> None:
        self._cluster = cluster
        self._kind = kind
        self._nodes: dict[str, int] = {}
        self._call: _Call | None = None  # The one under way that began last.

    def forget(self, key: str, hint: LeaderHint | None = None) -> None:
        """The coordinator was wrong; ``hint`` is who it is instead, if the answerer knew."""
        self._nodes.pop(key, None)
        if hint is not None and hint.node_id >= 0 and hint.host:
            self._remember(key, hint.node_id, hint.host, hint.port)

    async def find(self, key: str, timeout_ms: float, avoid: int = -1) -> int:
        """The coordinator's node id. Raises the last reason when none is found in time."""
        deadline = now_ms() + timeout_ms
        attempt = 0
        while key not in self._nodes:
            try:
                await self._find_once(key, deadline - now_ms(), avoid)
            except PenstockError as error:
                pause = self._cluster.backoff.delay_ms(attempt)
                attempt += 1
                if not error.retriable or now_ms() + pause >= deadline:
                    raise
                if self._call is not None and self._call.key == key:
                    self._call.refusal = error
                await asyncio.sleep(pause / 1000)
        return self._nodes[key]

    def trouble(self) -> PenstockError | None:
        """Why the call that is under way has no good answer yet, if it is not only on its way.

        Its ``reason`` is set. For who has one call at a time.
        """
        return None if self._call is None else self._call.trouble(self._kind)

    async def call(
        self,
        key: str,
        method: Callable[[grpc.aio.Channel], Any],
        request: Any,
        judge: Callable[[Any], Any],
        *,
        what: str,
        timeout_ms: float,
    ) -> Any:
        """What ``judge`` makes of the coordinator's answer, following it where it moves.

        ``judge`` raises an answer's error; what is retriable is tried again until the time is up.
        """
        under_way = self._call = _Call(key, what, now_ms())
        try:
            return await self._call_until(
                now_ms() + timeout_ms, under_way, method=method, request=request, judge=judge
            )
        finally:
            if self._call is under_way:
                self._call = None

    async def _call_until(
        self,
        deadline: float,
        under_way: _Call,
        *,
        method: Callable[[grpc.aio.Channel], Any],
        request: Any,
        judge: Callable[[Any], Any],
    ) -> Any:
        key = under_way.key
        attempt = 0
        avoid = -1
        while True:
            node_id = -1
            try:
                node_id = await self.find(key, max(1.0, deadline - now_ms()), avoid)
                response = await self._cluster.call(
                    node_id,
                    method,
                    request,
                    timeout_ms=min(deadline - now_ms(), self._cluster.config.request_timeout_ms),
                    what=under_way.what,
                )
                return judge(response)
            except PenstockError as error:
                pause = self._cluster.backoff.delay_ms(attempt)
                # The coordinator may be a moment behind about topics; thrice is sure.
                unknown = isinstance(error, _NO_SUCH_TOPIC) and attempt >= 2
                if unknown or not error.retriable or now_ms() + pause >= deadline:
                    raise
                attempt += 1
                under_way.refusal = error
                if isinstance(error, LOOK_AGAIN):
                    if isinstance(error, NetworkError):
                        avoid = node_id
                    self.forget(key, error.leader)
                    if error.leader is not None and attempt == 1:
                        continue  # The answerer knew who: ask at once.
            await asyncio.sleep(pause / 1000)

    async def _find_once(self, key: str, timeout_ms: float, avoid: int) -> None:
        response = await self._cluster.ask_any(
            lambda channel: metadata_pb2_grpc.MetadataStub(channel).FindCoordinator,
            metadata_pb2.FindCoordinatorRequest(type=_TYPES[self._kind], key=key),
            what="Metadata.FindCoordinator",
            timeout_ms=max(1.0, timeout_ms),
            avoid=avoid,
        )
        if response.HasField("error"):
            raise error_from_proto(response.error)
        found = response.coordinator
        if found.node_id < 0:
            raise CoordinatorNotAvailableError(f"{self._kind.value} {key!r} has no coordinator now")
        self._remember(key, found.node_id, found.host, found.port)

    def _remember(self, key: str, node_id: int, host: str, port: int) -> None:
        metadata = self._cluster.metadata
        if host:
            metadata.brokers = {**metadata.brokers, node_id: Broker(node_id, host, port)}
        self._nodes[key] = node_id
