"""Members of groups in threads of their own, with the sync and the asyncio consumer alike."""

from __future__ import annotations

import asyncio
import inspect
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from penstock.client import AsyncConsumer, Consumer, ConsumerRecord, TopicPartition

Kind = type[Consumer] | type[AsyncConsumer]
KINDS: tuple[Kind, ...] = (Consumer, AsyncConsumer)

_POLL_MS = 50
_STOP_S = 30


async def settle(outcome: Any) -> Any:
    """What the sync consumer returns, and what the asyncio one is waited for."""
    return await outcome if inspect.isawaitable(outcome) else outcome


class Listener:
    """Notes what it hears, in order. While ``slow`` is set, giving back takes until it is not."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.heard: list[tuple[str, frozenset[int]]] = []
        self.may_give_back = threading.Event()
        self.may_give_back.set()

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> Any:
        self._note("revoked", partitions)
        if self._kind is AsyncConsumer:
            return asyncio.to_thread(self.may_give_back.wait, _STOP_S)
        return self.may_give_back.wait(_STOP_S)

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("assigned", partitions)

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("lost", partitions)

    def of(self, what: str) -> set[int]:
        """All partitions that were revoked, assigned or lost."""
        return {number for kind, numbers in self.heard for number in numbers if kind == what}

    def _note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        self.heard.append((what, frozenset(entry.partition for entry in partitions)))


class GroupMember:
    """One member, which polls all the time unless it is told to be busy."""

    def __init__(
        self,
        kind: Kind,
        bootstrap: str,
        topics: str | Sequence[str] | re.Pattern[str],
        **settings: Any,
    ) -> None:
        self.listener = Listener(kind)
        # Never changed, only replaced: others read it while the thread reads on.
        self.seen: Counter[tuple[str, int, bytes]] = Counter()
        self.owned: frozenset[TopicPartition] = frozenset()
        self.error: BaseException | None = None
        self._asked: queue.Queue[tuple[Callable[[Any], Any], Future[Any]]] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._stop = threading.Event()
        settings = {"auto_offset_reset": "earliest", **settings}
        self._thread = threading.Thread(
            target=self._run, args=(kind, bootstrap, topics, settings), daemon=True
        )
        self._thread.start()

    @property
    def numbers(self) -> set[int]:
        """The partitions held, by number."""
        return {entry.partition for entry in self.owned}

    @property
    def values(self) -> Counter[bytes]:
        """How often each value was read."""
        found: Counter[bytes] = Counter()
        for (_, _, value), count in self.seen.items():
            found[value] += count
        return found

    def ask(self, what: Callable[[Any], Any]) -> Any:
        """Have the member do something with its consumer, between two polls; what came of it."""
        answer: Future[Any] = Future()
        self._asked.put((what, answer))
        return answer.result(_STOP_S)

    @contextmanager
    def processing(self) -> Iterator[None]:
        """Meanwhile the member processes, for as long as that takes, and does not poll."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    def stop(self) -> None:
        """Close the consumer. Raises what ended the member before."""
        self._stop.set()
        self._idle.set()
        self.listener.may_give_back.set()
        self._thread.join(_STOP_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self, kind: Kind, bootstrap: str, topics: Any, settings: dict[str, Any]) -> None:
        try:
            asyncio.run(self._read(kind(bootstrap, **settings), topics))
        except BaseException as error:
            self.error = error

    async def _read(self, consumer: Consumer | AsyncConsumer, topics: Any) -> None:
        consumer.subscribe(topics, self.listener)
        try:
            while not self._stop.is_set():
                await asyncio.to_thread(self._idle.wait)
                await self._answer(consumer)
                records: list[ConsumerRecord] = await settle(consumer.poll(_POLL_MS))
                self.seen = self.seen + Counter(
                    (record.topic, record.partition, record.value) for record in records
                )
                self.owned = consumer.assignment()
        finally:
            await settle(consumer.close())

    async def _answer(self, consumer: Consumer | AsyncConsumer) -> None:
        while not self._asked.empty():
            what, answer = self._asked.get()
            try:
                answer.set_result(await settle(what(consumer)))
            except BaseException as error:
                answer.set_exception(error)
