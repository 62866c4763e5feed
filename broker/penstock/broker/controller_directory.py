"""Which controllers there are, which one is active, and how to ask it something."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import grpc
import structlog
from grpc import aio

from penstock.raft_meta.connecting import NodeChannels, NodeConnector
from penstock.v1 import common_pb2, controller_pb2
from penstock.v1.controller_pb2_grpc import ControllerStub
from penstock.wire.errors import (
    ErrorCode,
    LeaderHint,
    NetworkError,
    NotControllerError,
    NotEnoughVotersError,
    PenstockError,
    RequestTimedOutError,
    error_from_proto,
)
from penstock.wire.transport import format_address

if TYPE_CHECKING:
    # The type stubs know it, the generated module does not.
    from penstock.v1.controller_pb2_grpc import ControllerAsyncStub

log = structlog.get_logger()

_RETRY_MS: Final = 50
"""How long to wait for news of another active controller before the last one is asked again."""
_FOUNDING_MS: Final = 3_000
"""The first start of a cluster takes less, once all of its controllers run."""
_MAJORITY_MS: Final = 8_000
"""Elections take less on busy machines too. After so long a person is not kept waiting for an
active controller where no majority of the voters can be reached.
"""
_NEVER_SENT: Final = (
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
)
"""How gRPC says that there was no connection on which a question could have left."""

Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class ActiveController:
    """The newest active controller heard of."""

    node_id: int
    epoch: int
    address: str


class Prospects(Protocol):
    """Says whether to wait for an active controller; raises where that is in vain."""

    async def require_founded(self) -> None:
        """Raise ClusterNotFoundedError if nobody has founded the cluster."""
        ...

    async def require_majority(self) -> None:
        """Raise NotEnoughVotersError if too few of the voters can be reached."""
        ...


class ControllerDirectory:
    """The controllers' addresses and channels. Used on one event loop."""

    def __init__(self, voters: dict[int, tuple[str, int]], connector: NodeConnector) -> None:
        self._prospects: Prospects | None = None
        self._voters = {node: format_address(host, port) for node, (host, port) in voters.items()}
        self._channels = NodeChannels(connector)
        self._active: ActiveController | None = None
        self._news = asyncio.Event()  # Set, and replaced, whenever another one becomes active.

    @property
    def active(self) -> ActiveController | None:
        """The newest active controller heard of; it may be gone already."""
        return self._active

    def while_none_is_active(self, prospects: Prospects) -> None:
        """Have it asked whether to wait for an active controller.

        Whether the cluster is founded while no active controller was ever heard of, whether there
        is a majority when one was waited for in vain for long; see ``call``.
        """
        self._prospects = prospects

    def voters(self) -> dict[int, str]:
        """The address of each controller by node id."""
        return dict(self._voters)

    def learn(self, voters: Iterable[controller_pb2.QuorumVoter]) -> None:
        """Take note of where controllers are; those of the settings stay known."""
        for voter in voters:
            self._voters[voter.node_id] = format_address(voter.host, voter.port)

    def stub(self, node_id: int, address: str) -> ControllerAsyncStub:
        """A stub for the controller ``node_id`` at ``address``; channels are kept."""
        channel = self._channels.get(address, node_id)
        # The generated stub serves both kinds of channel; only its type tells them apart.
        stub: ControllerAsyncStub = cast("Any", ControllerStub(channel))
        return stub

    def observe(self, node_id: int, epoch: int, host: str, port: int) -> None:
        """Take note that ``node_id`` is active in ``epoch``; older news are ignored.

        In the same epoch it is the same controller, of which another address may have become known.
        """
        if node_id < 0 or not host:
            return
        told = ActiveController(node_id, epoch, format_address(host, port))
        if self._active is not None and (epoch < self._active.epoch or told == self._active):
            return
        self._active = told
        self._news.set()
        self._news = asyncio.Event()

    def observe_hint(self, hint: LeaderHint | None) -> None:
        """Take note of the controller that a NOT_CONTROLLER answer names."""
        if hint is not None:
            self.observe(hint.node_id, hint.leader_epoch, hint.host, hint.port)

    async def wait_news(self, than: ActiveController | None, timeout_ms: int) -> None:
        """Wait until the active controller is another than ``than``, or the time is over."""
        if self._active != than:
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._news.wait()
        except TimeoutError:
            pass

    async def call(
        self,
        ask: Callable[[ControllerAsyncStub, float], Awaitable[Response]],
        error_of: Callable[[Response], common_pb2.Error | None],
        *,
        timeout_ms: int,
        what: str,
        gives_up: bool = False,
    ) -> Response:
        """Ask the active controller, following it when the office moves.

        The question may be put more than once: it must be one that takes effect once. Typed
        refusals come back in the response, but for NOT_CONTROLLER. When no active controller
        answered in time, raises NotControllerError if the question certainly reached none, or
        RequestTimedOutError: the outcome is then unknown. While none was ever active, raises
        ClusterNotFoundedError for a cluster that nobody has founded. With ``gives_up``, for a
        person who waits, raises NotEnoughVotersError (nothing was done) after some seconds in
        which no majority of the voters could be reached.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        look_s = loop.time() + _MAJORITY_MS / 1000
        failure: PenstockError = NotControllerError("no active controller is known")
        may_be_done = False
        while (left := deadline - loop.time()) > 0:
            if gives_up and loop.time() >= look_s:
                await self._look_for_majority(what, may_be_done=may_be_done)
                look_s = loop.time() + _MAJORITY_MS / 1000
            active = self._active
            if active is None:
                await self.wait_news(None, min(_FOUNDING_MS, int(left * 1000) + 1))
                if self._active is None and self._prospects is not None:
                    await self._prospects.require_founded()
                continue
            try:
                response = await ask(self.stub(active.node_id, active.address), left)
                error = error_of(response)
                if error is None or error.code != ErrorCode.NOT_CONTROLLER:
                    return response
                failure = error_from_proto(error)
                self.observe_hint(failure.leader)
            except aio.AioRpcError as error:
                failure = _transport_failure(error, active)
                may_be_done = may_be_done or not _was_never_sent(error)
            await self.wait_news(active, min(_RETRY_MS, int(left * 1000) + 1))
        message = (
            f"{what}: no active controller answered within {timeout_ms} ms; the last answer "
            f"was: {failure.message}"
        )
        if may_be_done:
            raise RequestTimedOutError(
                f"{message}. The outcome is unknown; check that a majority of the controllers is "
                "running"
            )
        raise NotControllerError(f"{message}. Nothing was done; next: see `penstock quorum status`")

    async def _look_for_majority(self, what: str, *, may_be_done: bool) -> None:
        if self._prospects is None:
            return
        try:
            await self._prospects.require_majority()
        except NotEnoughVotersError as error:
            if may_be_done:
                raise RequestTimedOutError(
                    f"{what}: an answer was lost, and the outcome is unknown; {error.message}"
                ) from error
            raise NotEnoughVotersError(f"{what} was not carried out: {error.message}") from error

    async def close(self) -> None:
        """Close every channel."""
        await self._channels.close()


def _was_never_sent(error: aio.AioRpcError) -> bool:
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and details.startswith(_NEVER_SENT)


def _transport_failure(error: aio.AioRpcError, active: ActiveController) -> NetworkError:
    code = error.code()
    name = code.name if isinstance(code, grpc.StatusCode) else str(code)
    return NetworkError(
        f"controller {active.node_id} at {active.address}: {name} {error.details()}"
    )
