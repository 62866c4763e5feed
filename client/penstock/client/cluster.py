"""A client's way into the cluster: bootstrap, channels, and asking whichever broker answers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar, cast

import grpc

from penstock.client.background import ForkGuard
from penstock.client.config import Address, CommonConfig
from penstock.client.core.backoff import Backoff
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.tls import ClientTls
from penstock.client.transport import diagnose, rpc_error
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import (
    BootstrapError,
    ClientClosedError,
    InvalidRequestError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.transport import CHANNEL_OPTIONS, format_address

T = TypeVar("T")

_LOG: Final = logging.getLogger("penstock.client")
_CHECK_ADDRESSES: Final = ". Check the addresses, and that brokers run there"
_BOOTSTRAP_ATTEMPT_MS: Final = 2_000.0
_FIRST_ATTEMPT_MS: Final = 1_000.0
_FORMER_CHANNELS: Final = 256
"""So many channels from before a change of certificates are kept for streams on them."""


def now_ms() -> float:
    """A monotonic clock."""
    return time.monotonic() * 1000


def wall_ms() -> int:
    """The time of day, as records carry it."""
    return time.time_ns() // 1_000_000


class Cluster:
    """Channels to brokers and what is known of them. Belongs to one event loop."""

    def __init__(self, config: CommonConfig) -> None:
        self.config = config
        self.metadata = MetadataCache()
        self.backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, random.random)
        self._tls = ClientTls(config.tls) if config.tls is not None else None
        self._credentials = self._tls.credentials() if self._tls is not None else None
        self._channels: dict[Address, grpc.aio.Channel] = {}
        self._former: deque[grpc.aio.Channel] = deque()  # Made with certificates that changed.
        self._retired: dict[grpc.aio.Channel, asyncio.Task[None]] = {}  # Closed, once quiet.
        self._good: Address | None = None  # Answered last.
        self._starting: asyncio.Task[None] | None = None
        self._started = False
        self._closed = False

    @property
    def started(self) -> bool:
        """Whether some broker has answered."""
        return self._started

    async def start(self) -> None:
        """Find one broker that answers. Safe to call at any time.

        Raises BootstrapError, or ClientClosedError when it is closed meanwhile.
        """
        if self._started:
            return
        self._check_open()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._bootstrap())
        task = self._starting
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                self._check_open()  # It was not the caller that was cancelled.
            raise
        finally:
            if task.done() and self._starting is task:
                self._starting = None

    async def close(self) -> None:
        """Close every channel. Idempotent."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        channels = [*self._channels.values(), *self._former, *self._retired]
        self._channels = {}
        self._former.clear()
        for channel in channels:
            await channel.close(None)
        await asyncio.gather(*self._retired.values(), return_exceptions=True)

    def retire_channels(self) -> None:
        """Close the channels to brokers that are gone, after what is under way on them."""
        used = {(broker.host, broker.port) for broker in self.metadata.brokers.values()}
        used.update(self.config.bootstrap)
        if self._good not in used:
            self._good = None
        for address in self._channels.keys() - used:
            channel = self._channels.pop(address)
            self._retired[channel] = asyncio.ensure_future(self._close_quietly(channel))

    async def _close_quietly(self, channel: grpc.aio.Channel) -> None:
        # Longer than any request: a call that is cut off looks like a cancelled task.
        grace_s = 2 * self.config.request_timeout_ms / 1000
        try:
            await channel.close(grace_s)
        finally:
            self._retired.pop(channel, None)

    def channel(self, address: Address) -> grpc.aio.Channel:
        """The channel to an address."""
        self._check_open()
        self._renew_credentials()
        found = self._channels.get(address)
        if found is None:
            ForkGuard.note_grpc()
            found = self._open(format_address(*address))
            self._channels[address] = found
        return found

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)

    def _renew_credentials(self) -> None:
        """Have new channels made when the certificate files have changed.

        What is under way on the former ones goes on; they are idle once it has ended.
        """
        if self._tls is None:
            return
        credentials = self._tls.credentials()
        if credentials is self._credentials:
            return
        self._credentials = credentials
        self._former.extend(self._channels.values())
        self._channels = {}
        while len(self._former) > _FORMER_CHANNELS:
            channel = self._former.popleft()
            self._retired[channel] = asyncio.ensure_future(self._close_quietly(channel))

    def address_of(self, node_id: int) -> Address | None:
        """Where a broker is, if that is known."""
        broker = self.metadata.brokers.get(node_id)
        return (broker.host, broker.port) if broker is not None else None

    def name_of(self, node_id: int) -> str:
        """The broker as messages name it."""
        broker = self.metadata.brokers.get(node_id)
        return str(broker) if broker is not None else f"broker {node_id} (address unknown)"

    def channel_to(self, node_id: int) -> grpc.aio.Channel:
        """The channel to a broker. Raises NetworkError when its address is not known."""
        address = self.address_of(node_id)
        if address is None:
            raise NetworkError(f"the address of broker {node_id} is not known")
        return self.channel(address)

    async def call(
        self,
        node_id: int,
        method: Callable[[grpc.aio.Channel], Any],
        request: Any,
        *,
        timeout_ms: float,
        what: str,
    ) -> Any:
        """One unary call to one broker. Raises the typed error of its gRPC status."""
        channel = self.channel_to(node_id)
        try:
            return await method(channel)(request, timeout=max(timeout_ms, 1) / 1000)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.name_of(node_id), what) from None
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise NetworkError(f"{self.name_of(node_id)}: {error}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled but the call, with its channel.
            self._check_open()
            raise NetworkError(f"the connection to {self.name_of(node_id)} was closed") from None

    async def ask_any(
        self,
        method: Callable[[grpc.aio.Channel], Any],
        request: Any,
        *,
        what: str,
        timeout_ms: float,
        attempt_ms: float = _FIRST_ATTEMPT_MS,
        avoid: int = -1,
        once: bool = False,
    ) -> Any:
        """The answer of the first broker that gives one, trying each in turn until the time is up.

        Each attempt may take ``attempt_ms``, twice that in the next round, and so on: a hung
        broker costs little, a slow answer is still had. ``avoid`` is asked last. With ``once``
        a request that may have reached a broker is not repeated. Raises NetworkError or
        RequestTimedOutError with the last reason, BootstrapError while none ever answered.
        """
        await self.start()
        deadline = now_ms() + timeout_ms
        last: PenstockError | None = None
        attempt = 0
        while True:
            for address in self._candidates(avoid):
                remaining = deadline - now_ms()
                if remaining <= 0:
                    break
                allowed = min(remaining, attempt_ms * 2 ** min(attempt, 10))
                try:
                    answer = await method(self.channel(address))(request, timeout=allowed / 1000)
                except grpc.aio.AioRpcError as error:
                    last = rpc_error(error, format_address(*address), what)
                    if isinstance(last, InvalidRequestError) or (
                        once and error.code() is not grpc.StatusCode.UNAVAILABLE
                    ):
                        raise last from None
                    if self._good == address:
                        self._good = None
                    continue
                self._good = address
                return answer
            pause = self.backoff.delay_ms(attempt)
            attempt += 1
            if now_ms() + pause >= deadline:
                break
            await asyncio.sleep(pause / 1000)
        message = f"no broker answered {what} within {timeout_ms:.0f} ms"
        if last is not None:
            raise type(last)(f"{message}; last: {last.message}")
        raise RequestTimedOutError(message)

    def doubt_last(self) -> str:
        """Do not prefer who answered last any more; its address."""
        doubted, self._good = self._good, None
        return "an address that is gone" if doubted is None else format_address(*doubted)

    def _candidates(self, avoid: int) -> list[Address]:
        """Whom to ask: who answered last, living brokers, fenced ones, bootstrap addresses."""
        shunned = self.address_of(avoid)
        living = [(b.host, b.port) for b in self.metadata.brokers.values() if not b.fenced]
        fenced = [(b.host, b.port) for b in self.metadata.brokers.values() if b.fenced]
        random.shuffle(living)
        first = [self._good] if self._good is not None else []
        order = list(dict.fromkeys([*first, *living, *self.config.bootstrap, *fenced]))
        if shunned in order:
            order.remove(shunned)
            order.append(shunned)
        return order

    async def _bootstrap(self) -> None:
        started = now_ms()
        deadline = started + self.config.bootstrap_timeout_ms
        attempt = 0
        while True:
            answers = await self._bootstrap_round(min(_BOOTSTRAP_ATTEMPT_MS, deadline - now_ms()))
            if answers is None:
                self._started = True
                return
            pause = self.backoff.delay_ms(attempt)
            attempt += 1
            if now_ms() + pause >= deadline:
                break
            await asyncio.sleep(pause / 1000)
        found = await asyncio.gather(
            *(
                diagnose(host, port, answers[(host, port)], self.config.tls)
                for host, port in answers
            )
        )
        steps = list(dict.fromkeys(one.step for one in found if one.step))
        raise BootstrapError(
            f"no bootstrap address could be used within {now_ms() - started:.0f} ms: "
            + "; ".join(one.what for one in found)
            + (f"; next: {'; '.join(steps)}" if steps else _CHECK_ADDRESSES)
        )

    async def _bootstrap_round(self, timeout_ms: float) -> dict[Address, str] | None:
        """Ask all addresses at once. None when one answered, else what each one did."""
        addresses = list(dict.fromkeys(self.config.bootstrap))
        request = metadata_pb2.DescribeClusterRequest()
        answers: dict[Address, str] = {}

        async def ask(address: Address) -> tuple[Address, metadata_pb2.DescribeClusterResponse]:
            stub: Any = metadata_pb2_grpc.MetadataStub(self.channel(address))
            return address, await stub.DescribeCluster(request, timeout=max(timeout_ms, 1) / 1000)

        tasks = {asyncio.ensure_future(ask(address)): address for address in addresses}
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    address, response = await done
                except grpc.aio.AioRpcError:
                    continue
                self.metadata.replace_brokers(response.brokers)
                self.metadata.cluster_id = response.cluster_id
                self._good = address
                return None
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for address, outcome in zip(tasks.values(), outcomes, strict=True):
            answers[address] = _outcome(outcome)
        return answers

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the client is closed")


def _outcome(outcome: object) -> str:
    if isinstance(outcome, grpc.aio.AioRpcError):
        return f"{outcome.code().name}: {outcome.details() or 'no details'}"
    return str(outcome)


async def gather_all(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; the first failure is raised once all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)
