"""Channels to the other brokers, where they serve brokers."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from grpc import StatusCode, aio

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.ports import ChannelFactory
from penstock.raft_meta import tracing
from penstock.v1.coordination_pb2_grpc import CoordinationStub
from penstock.wire.errors import NetworkError

_OF_THE_CALL: Final = frozenset(
    {
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.UNIMPLEMENTED,
        StatusCode.UNKNOWN,
        StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""How calls end though there is a broker: it is late, or older than the call, or fails at it, or
one of the messages is too large."""


class _Address(NamedTuple):
    """Whom a channel leads to: a broker that registered anew may be another process."""

    node_id: int
    host: str
    port: int
    broker_epoch: int


_Known = tuple[_Address, asyncio.Task[aio.Channel]]


class Peers:
    """One channel to each broker that is talked to, opened when it is first asked for and kept.

    Used on one event loop. ``open_channel`` finds out where the broker serves brokers.
    """

    def __init__(self, image: MetadataImage, open_channel: ChannelFactory) -> None:
        self._image = image
        self._open_channel = open_channel
        self._channels: dict[int, _Known] = {}

    async def channel(self, node_id: int) -> aio.Channel:
        """The channel to a broker; it stays the peers' own. Raises NetworkError."""
        record = self._image.brokers.get(node_id)
        if record is None:
            raise NetworkError(f"broker {node_id} is not registered now")
        address = _Address(node_id, record.host, record.port, record.broker_epoch)
        known = self._channels.get(node_id)
        if known is None or known[0] != address:
            opening = asyncio.create_task(self._open(address), name=f"reach broker {node_id}")
            self._channels[node_id] = address, opening
            await _give_back(known)
        else:
            opening = known[1]
        # Whoever gives up must not take the channel from the others that wait for it.
        await asyncio.wait([opening])
        if opening.cancelled():
            raise NetworkError(f"broker {node_id} moved, or this broker stops")
        error = opening.exception()
        if error is None:
            return opening.result()
        if self._channels.get(node_id) == (address, opening):
            del self._channels[node_id]
        if isinstance(error, aio.AioRpcError):
            raise NetworkError(
                f"broker {node_id} at {address.host}:{address.port} can't be reached: "
                f"{error.details() or error.code()}"
            ) from error
        raise error

    async def _open(self, address: _Address) -> aio.Channel:
        return await self._open_channel(address.node_id, address.host, address.port)

    async def ask(self, node_id: int, method: str, request: Any, timeout_s: float) -> Any:
        """What another broker's Coordination answers; NetworkError, naming it, where it does not.

        A channel that does not lead to a broker any more is given back. One whose answer is late,
        or is that this call can't be answered, stays: it is the way of others' calls too. (One that
        is dead is found out by its keepalive.)
        """
        channel = await self.channel(node_id)
        call = getattr(CoordinationStub(channel), method)
        try:
            return await call(request, timeout=timeout_s, metadata=tracing.outgoing())
        except aio.AioRpcError as error:
            if error.code() not in _OF_THE_CALL:
                # Where it serves brokers may have changed with its process.
                await self.forget(node_id, channel)
            raise NetworkError(f"broker {node_id}: {error.details() or error.code()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The channel was given back meanwhile, which gRPC tells as a cancellation. Who waits
            # was not cancelled, and must not end as if, with its work undone.
            raise NetworkError(
                f"the connection to broker {node_id} was given up before it answered"
            ) from None

    async def forget(self, node_id: int, failed: aio.Channel) -> None:
        """Give a channel back that failed; the next one begins with what may be another port.

        One that was opened since stays: whose call failed late must not end the calls of others.
        """
        known = self._channels.get(node_id)
        if known is not None and _channel_of(known) is failed:
            del self._channels[node_id]
            await _give_back(known)

    async def close(self) -> None:
        """Give all channels back."""
        while self._channels:
            await _give_back(self._channels.popitem()[1])


def _channel_of(known: _Known) -> aio.Channel | None:
    """The channel, where it is open."""
    opening = known[1]
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()


async def _give_back(known: _Known | None) -> None:
    if known is None:
        return
    opening = known[1]
    opening.cancel()  # Does nothing to one that is done.
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close(None)
