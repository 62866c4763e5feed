"""How administration asks brokers: what all parts of AsyncAdminClient stand on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc

from penstock.client import admin_values, arguments
from penstock.client.background import LoopGuard
from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import AdminConfig, AdminSettings
from penstock.client.coordinator import Coordinators, Kind
from penstock.client.descriptions import ClusterDescription
from penstock.client.leader_calls import LeaderCalls
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.v1 import admin_pb2_grpc, groups_pb2_grpc, metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    ClientClosedError,
    InvalidRequestError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_proto,
)

READ_MS: Final = 2_000.0
"""Beyond this another broker is asked; a reading harms nobody."""

_LEAST_PART: Final = 0.05
"""Of all its time a question that is repeated is given at least so much."""

_BROKERS_PART: Final = 0.95
"""Of an attempt's time the broker is given so much: it knows why nothing came of it, and must be
able to say so before the attempt ends.
"""

# After these a request may have been carried out all the same.
_FATE_UNKNOWN: Final = (NetworkError, RequestTimedOutError, UnknownServerError)


class AdminCalls:
    """Connections, and questions that are repeated as long as that can help."""

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        **settings: Unpack[AdminSettings],
    ) -> None:
        self.config = AdminConfig.load(bootstrap_servers, settings)
        self._guard = LoopGuard("AdminClient")
        self._cluster = Cluster(self.config)
        self._keeper = MetadataKeeper(self._cluster, lambda: None)
        self._leaders = LeaderCalls(self._cluster, self._keeper)
        self._coordinators = Coordinators(self._cluster)
        self._transactions = Coordinators(self._cluster, Kind.TRANSACTION)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Free the connections. Idempotent."""
        if self._closed or self._guard.foreign:
            return
        self._guard.check()
        self._closed = True
        await self._keeper.close()
        await self._cluster.close()

    async def describe_cluster(self, *, since_index: int = 0) -> ClusterDescription:
        """Brokers and the active controller. See ``AdminClient.describe_cluster``."""
        request = metadata_pb2.DescribeClusterRequest()
        judge = self._knowing(since_index, lambda answer: answer)
        return admin_values.cluster(await self._ask("DescribeCluster", request, judge))

    def _knowing(self, since_index: int, judge: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``judge`` of answers by brokers that know of the metadata up to ``since_index``.

        Another answer raises NetworkError, and who gave it is not preferred any more.
        """
        wanted = arguments.whole_number("since_index", since_index, 0, arguments.MAX_INT64)

        def judged(answer: Any) -> Any:
            found = judge(answer)
            # One that has heard of nothing has -1, and is asked what it knows all the same.
            if 0 < wanted > answer.metadata_index:
                who = self._cluster.doubt_last()
                raise NetworkError(
                    f"the broker at {who} knows of the metadata up to index "
                    f"{answer.metadata_index}, and they have changed up to {wanted}; next: ask "
                    "again; if it stays behind, see whether it reaches the controllers (`penstock "
                    "doctor`, and its log)"
                )
            return found

        return judged

    async def _ask(
        self,
        method: str,
        request: Any,
        judge: Callable[[Any], Any],
        *,
        stub: Callable[[grpc.aio.Channel], Any] = metadata_pb2_grpc.MetadataStub,
        took_effect: Callable[[PenstockError], Awaitable[bool]] | None = None,
        final: tuple[type[PenstockError], ...] = (),
    ) -> Any:
        """What ``judge`` makes of some broker's answer, retrying what is retriable, not ``final``.

        A change that was sent before, and of which nothing was heard, may be refused because it is
        made: ``took_effect`` says whether that refusal means so, and None is answered then.

        A request with a timeout goes on to the controller and may change something, so that it
        is not repeated on mere silence.
        """
        self._check_open()
        changes = hasattr(request, "timeout_ms")
        deadline = now_ms() + self.config.default_api_timeout_ms
        least = self.config.default_api_timeout_ms * _LEAST_PART
        sent = 0
        unheard = False  # What became of an earlier attempt is not known.

        def bind(channel: grpc.aio.Channel) -> Any:
            nonlocal sent
            sent += 1
            return getattr(stub(channel), method)

        attempt = 0
        while True:
            remaining = deadline - now_ms()
            if changes:
                attempt_ms = min(remaining, self.config.request_timeout_ms)
                request.timeout_ms = max(1, int(attempt_ms * _BROKERS_PART))
            try:
                return judge(
                    await self._cluster.ask_any(
                        bind,
                        request,
                        what=f"{stub.__name__.removesuffix('Stub')}.{method}",
                        timeout_ms=remaining,
                        attempt_ms=self.config.request_timeout_ms if changes else READ_MS,
                        once=changes,
                    )
                )
            except PenstockError as error:
                pause = self._cluster.backoff.delay_ms(attempt)
                # The broker asked may be a moment behind; thrice is sure.
                unknown = isinstance(error, UnknownTopicOrPartitionError) and attempt >= 2
                stands = unknown or isinstance(error, final) or not error.retriable
                # In the little time that may be left at the end nobody could answer, and what is
                # said of so short a wait would hide what the longer one was for.
                last = now_ms() + pause + least >= deadline
                if stands or last:
                    unheard = unheard or sent > attempt + 1  # Some without an answer of their own.
                    if changes and unheard and took_effect and await took_effect(error):
                        return None
                    if changes and unheard:
                        error.add_note(
                            f"the request was sent {sent} times, because an earlier answer did "
                            "not come; it may have taken effect then"
                        )
                    raise
                unheard = unheard or isinstance(error, _FATE_UNKNOWN)
                attempt += 1
            await asyncio.sleep(pause / 1000)

    async def _ask_node(
        self, node_id: int | None, method: str, request: Any, timeout_ms: float
    ) -> Any:
        """What one broker's Admin service answers at its advertised address; None: whichever does.

        Raises BrokerIdNotRegisteredError, or what its answer carries.
        """
        if node_id is None:
            return await self._ask(method, request, checked, stub=admin_pb2_grpc.AdminStub)
        wanted = arguments.whole_number("node_id", node_id, 0, arguments.MAX_INT32)
        cluster = await self.describe_cluster()
        known = {broker.node_id for broker in cluster.brokers}
        if wanted not in known:
            raise BrokerIdNotRegisteredError.among(wanted, known)
        self._cluster.metadata.replace_brokers(admin_values.broker_protos(cluster))
        return checked(
            await self._cluster.call(
                wanted,
                lambda channel: getattr(admin_pb2_grpc.AdminStub(channel), method),
                request,
                timeout_ms=timeout_ms,
                what=f"Admin.{method}",
            )
        )

    async def _ask_coordinator(
        self, group_id: str, method: str, request: Any, judge: Callable[[Any], Any]
    ) -> Any:
        self._check_open()
        return await self._coordinators.call(
            group_id,
            lambda channel: getattr(groups_pb2_grpc.GroupsStub(channel), method),
            request,
            judge,
            what=f"Groups.{method}",
            timeout_ms=self.config.default_api_timeout_ms,
        )

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the admin client is closed")


def only(entries: Sequence[Any]) -> Any:
    """The one entry of an answer to a question about one thing. Raises its error."""
    if len(entries) != 1:
        raise InvalidRequestError(f"the broker answered {len(entries)} entries where 1 was asked")
    raise_if_error(entries[0])
    return entries[0]


def checked(response: Any) -> Any:
    """The answer. Raises its error."""
    raise_if_error(response)
    return response


def raise_if_error(message: Any) -> None:
    """Raise the error that the message carries, if it does."""
    if message.HasField("error"):
        raise error_from_proto(message.error)
