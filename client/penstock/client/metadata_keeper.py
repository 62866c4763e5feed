"""Keeps a client's picture of its topics fresh: on demand, quickly after trouble, and by age."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Final

from penstock.client.cluster import Cluster, now_ms
from penstock.client.core.backoff import Backoff, Pacer
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import (
    ClientClosedError,
    PenstockError,
    RequestTimedOutError,
    error_from_proto,
)

_LOG: Final = logging.getLogger("penstock.client")
_QUICK_FIRST_MS: Final = 20.0
_QUICK_MOST_MS: Final = 50.0
_ATTEMPT_MS: Final = 500.0  # Beyond this another broker is asked: this one may hang.


class MetadataKeeper:
    """One task that asks for metadata, however many want it. Belongs to one event loop.

    ``on_update`` is called after each answer. Once it is closed nothing is asked any more, and
    who waits for an answer, or comes to wait, gets ClientClosedError.
    """

    def __init__(self, cluster: Cluster, on_update: Callable[[], object]) -> None:
        self._cluster = cluster
        self._on_update = on_update
        self._topics: set[str] = set()
        self._every_topic = False
        self.knows_every_topic = False  # An answer named them all.
        self._requested = asyncio.Event()
        self._avoid = -1
        self._waiters: list[asyncio.Future[None]] = []
        self._last_error: PenstockError | None = None
        self._warned: set[type[PenstockError]] = set()  # Of what, since the last answer.
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._pacer = Pacer(
            Backoff(_QUICK_FIRST_MS, _QUICK_MOST_MS, random.random),
            Backoff(
                cluster.config.retry_backoff_ms, cluster.config.retry_backoff_max_ms, random.random
            ),
        )

    def watch(self, topics: Iterable[str]) -> None:
        """Be interested in these topics from now on."""
        self._topics.update(topics)

    def watch_every_topic(self) -> None:
        """Be interested in every topic (for pattern subscriptions)."""
        self._every_topic = True

    def forget(self, topics: Iterable[str]) -> None:
        """Be no longer interested."""
        self._topics.difference_update(topics)

    def request(self, avoid: int = -1) -> None:
        """Have metadata asked for soon; of another broker than ``avoid`` if possible."""
        if self._closed:
            return
        if avoid >= 0:
            self._avoid = avoid
        self._requested.set()
        self._ensure_running()

    async def updated(self, timeout_ms: float) -> None:
        """Wait for the next answer, or for the time to be over. Asks for one.

        Raises ClientClosedError.
        """
        self._check_open()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.request()
        try:
            await asyncio.wait([waiter], timeout=max(timeout_ms, 0) / 1000)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        self._check_open()

    async def await_topic(self, topic: str, timeout_ms: float) -> int:
        """The topic's partition count, once it is known.

        Raises UnknownTopicOrPartitionError when the brokers agree that it does not exist, its
        InvalidTopicError, BootstrapError, RequestTimedOutError or what asking again does not mend
        (ClusterNotFoundedError) when the time is over, or ClientClosedError. The topic is watched
        from then on if it was before, or exists.
        """
        await self._cluster.start()
        metadata = self._cluster.metadata
        watched = topic in self._topics
        self.watch((topic,))
        deadline = now_ms() + timeout_ms
        if metadata.verdict(topic) is not None:
            metadata.forget(topic)  # An old verdict: it may have been made since.
        while topic not in metadata:
            verdict = metadata.verdict(topic)
            if verdict is not None:
                if not watched:
                    self.forget((topic,))
                raise type(verdict)(verdict.message)
            remaining = deadline - now_ms()
            if remaining <= 0:
                self.request()  # For who waits for nothing: it is known when they try again.
                raise self._not_in_time(
                    f"no metadata for topic {topic!r} within {timeout_ms:.0f} ms"
                )
            await self.updated(remaining)
        return metadata.partition_count(topic)

    def _not_in_time(self, what: str) -> PenstockError:
        last = self._last_error
        if last is None:
            return RequestTimedOutError(what)
        kind = RequestTimedOutError if last.retriable else type(last)
        return kind(f"{what}; last: {last.message}")

    async def close(self) -> None:
        """Stop asking; whoever waits gets ClientClosedError. Idempotent."""
        self._closed = True
        self._wake_waiters()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the client was closed")

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        max_age_s = self._cluster.config.metadata_max_age_ms / 1000
        while True:
            try:
                async with asyncio.timeout(max_age_s):
                    await self._requested.wait()
            except TimeoutError:
                pass  # Old enough to be asked for anew.
            pause = self._pacer.next_ms(now_ms()) - now_ms()
            if pause > 0:
                await asyncio.sleep(pause / 1000)
            self._requested.clear()
            self._pacer.asked(now_ms())
            await self._refresh_once()

    async def _refresh_once(self) -> None:
        avoid, self._avoid = self._avoid, -1
        every_topic = self._every_topic
        request = metadata_pb2.DescribeTopicsRequest(
            topics=sorted(self._topics), all_topics=every_topic
        )
        try:
            response = await self._cluster.ask_any(
                lambda channel: metadata_pb2_grpc.MetadataStub(channel).DescribeTopics,
                request,
                what="Metadata.DescribeTopics",
                timeout_ms=self._cluster.config.request_timeout_ms,
                attempt_ms=_ATTEMPT_MS,
                avoid=avoid,
            )
            if response.HasField("error"):
                raise error_from_proto(response.error)
        except PenstockError as error:
            self._last_error = error
            if type(error) not in self._warned:
                self._warned.add(type(error))
                _LOG.warning("metadata could not be had: %s", error.message)
        else:
            self._last_error = None
            self._warned.clear()
            if every_topic:
                self.knows_every_topic = True
                named = {entry.name for entry in response.topics}
                for gone in [name for name in self._cluster.metadata.topics if name not in named]:
                    if gone not in self._topics:
                        self._cluster.metadata.forget(gone)
            self._cluster.metadata.apply(response, now_ms())
            self._cluster.retire_channels()
        self._wake_waiters()
        self._on_update()
