"""A client that reads all partitions of a topic: it follows, may seek, and reads all in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Surroundings
from penstock.chaos.workloads.casting import API_TIMEOUT_MS, PAUSE_S, REQUEST_TIMEOUT_MS, shut
from penstock.chaos.workloads.outcomes import words_of
from penstock.chaos.workloads.values import runs_of
from penstock.client import AsyncConsumer, PenstockError, TopicPartition
from penstock.client.config import IsolationLevel

SEEK_EVERY_S: Final = 2.0
_SEEK_BACK: Final = 2_000
"""So many records, or milliseconds, a seek goes back at most, but for those to the beginning: who
reads again and again what is long ago never gets to what is new."""
_EARLIEST_CHANCE: Final = 0.05
_SETTLE_S: Final = 60.0
"""So long transactions have to end after everything was healed."""

Runs = list[list[Any]]
"""``[partition, offset, producer, first, count]``, as histories have them."""


class Reader:
    """A client by itself, and a part of others.

    Parameters of its specification: ``topic``, ``partitions``, ``seeks`` and ``isolation``.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        recorder: Recorder | None = None,
        topic: str = "",
        isolation: IsolationLevel | None = None,
    ) -> None:
        parameters = surroundings.spec.parameters
        self._surroundings: Final = surroundings
        self._recorder: Final[Recorder] = recorder or surroundings.recorder
        self._topic: Final[str] = topic or parameters["topic"]
        self._isolation: Final[IsolationLevel] = isolation or parameters.get(
            "isolation", "read_uncommitted"
        )
        self._partitions: Final = [
            TopicPartition(self._topic, number) for number in range(parameters["partitions"])
        ]
        self._positions: Final[dict[str, int]] = {}

    def _consumer(self) -> AsyncConsumer:
        return AsyncConsumer(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            isolation_level=self._isolation,
            auto_offset_reset="earliest",
            max_poll_records=5_000,
            default_api_timeout_ms=API_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
        )

    async def run(self) -> None:
        """Read for ever."""
        random, seeks = self._surroundings.random, self._surroundings.spec.parameters.get("seeks")
        consumer = await self.begin()
        try:
            seek_at = time.monotonic() + SEEK_EVERY_S
            while True:
                if seeks and time.monotonic() >= seek_at:
                    partition, wanted = draw_seek(random, self._partitions, self._positions)
                    await self._seek_to(consumer, partition, dated(wanted))
                    seek_at = time.monotonic() + random.uniform(0.5, 1.5) * SEEK_EVERY_S
                if not await self.poll(consumer):
                    await asyncio.sleep(PAUSE_S)
        finally:
            await shut(consumer)

    async def finish(self) -> None:
        """Read every partition from its beginning to its end."""
        await self.read_all()

    async def read_all(self, at_least: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """Read every partition from its beginning to its end; where the ends are.

        With ``at_least`` the ends are waited for to be there: those of read_committed readers are
        where the first open transaction begins, and transactions end in the end.
        """
        consumer = await self.begin()
        try:
            for partition in self._partitions:
                await self._rewind(consumer, partition)
            ends = await self._settled(consumer, at_least or {})
            left = dict(ends)
            while left:
                await self.poll(consumer, ends=left)
                for name in [one for one in left if self._positions[one] >= left[one]]:
                    del left[name]
            return ends
        finally:
            await shut(consumer)

    async def _settled(
        self, consumer: AsyncConsumer, at_least: Mapping[str, int]
    ) -> Mapping[str, int]:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            ends = await self._ends(consumer)
            if all(ends[name] >= end for name, end in at_least.items()):
                return ends
            if time.monotonic() >= deadline:
                return ends
            await asyncio.sleep(PAUSE_S)

    async def _rewind(self, consumer: AsyncConsumer, partition: TopicPartition) -> None:
        """Go to the beginning, as soon as its leader can be asked for it."""
        while True:
            if await self._seek_to(consumer, partition, {"where": "earliest"}):
                return
            await asyncio.sleep(PAUSE_S)

    async def begin(self) -> AsyncConsumer:
        """A consumer at the beginning of all partitions, as soon as there is a way to one."""
        while True:
            consumer = self._consumer()
            try:
                await consumer.assign(self._partitions)
            except PenstockError:
                await shut(consumer)
                await asyncio.sleep(PAUSE_S)
                continue
            except BaseException:
                await shut(consumer)
                raise
            self._positions.update({str(one): 0 for one in self._partitions})
            return consumer

    async def _ends(self, consumer: AsyncConsumer) -> dict[str, int]:
        """Where each partition ends, as soon as the leaders of all can be asked."""
        while True:
            try:
                ends = await consumer.end_offsets(self._partitions)
            except PenstockError:
                await asyncio.sleep(PAUSE_S)
                continue
            return {str(partition): end for partition, end in ends.items()}

    async def poll(
        self,
        consumer: AsyncConsumer,
        *,
        ends: Mapping[str, int] | None = None,
        timeout_ms: float = 500,
    ) -> Runs:
        """One operation; what it brought."""
        asked = {
            "topic": self._topic,
            "positions": dict(self._positions),
            "isolation": self._isolation,
        }
        self._recorder.invoke("poll", asked)
        try:
            runs = await poll_once(consumer, timeout_ms)
            lags = (await consumer.metrics()).records_lag
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return []
        for partition, after in consumer.positions().items():
            self._positions[str(partition)] = after.offset
        seen = {str(one): self._positions[str(one)] + lag for one, lag in lags.items()}
        self._recorder.ok(
            {
                **asked,
                "runs": runs,
                "positions": dict(self._positions),
                "ends": {**seen, **(ends or {})},
            }
        )
        return runs

    async def _seek_to(
        self, consumer: AsyncConsumer, partition: TopicPartition, wanted: Mapping[str, Any]
    ) -> bool:
        offset = await seek_to(self._recorder, consumer, partition, wanted)
        if offset is None:
            return False
        self._positions[str(partition)] = offset
        return True


async def poll_once(consumer: AsyncConsumer, timeout_ms: float) -> Runs:
    """What a poll gives, as runs. Raises what ``poll`` raises."""
    batches = await consumer.poll_batch(timeout_ms=timeout_ms)
    return runs_of(
        (record.partition, record.offset, record.value)
        for records in batches.values()
        for record in records
    )


def draw_seek(
    random: Random, partitions: Sequence[TopicPartition], positions: Mapping[str, int]
) -> tuple[TopicPartition, dict[str, Any]]:
    """A seek somewhere by chance: which partition, and where. A time is how long ago it is, in
    milliseconds (``ago``).
    """
    partition = random.choice(partitions)
    back = random.randint(0, _SEEK_BACK)
    where = random.choice(("latest", "offset", "timestamp"))
    if random.random() < _EARLIEST_CHANCE:
        return partition, {"where": "earliest"}
    if where == "offset":
        return partition, {"offset": max(0, positions.get(str(partition), 0) - back)}
    if where == "timestamp":
        return partition, {"ago": back}
    return partition, {"where": "latest"}


def dated(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with a time of today."""
    if "ago" in wanted:
        return {"timestamp": int(time.time() * 1000) - wanted["ago"]}
    return dict(wanted)


async def seek_to(
    recorder: Recorder,
    consumer: AsyncConsumer,
    partition: TopicPartition,
    wanted: Mapping[str, Any],
    *,
    member: str = "",
) -> int | None:
    """One operation; where it led, and None where it was not done."""
    asked = {"topic": partition.topic, "partition": partition.partition, **wanted}
    if member:
        asked["member"] = member
    recorder.invoke("seek", asked)
    try:
        offset = await find(consumer, partition, wanted)
        await consumer.seek(partition, offset)
    except PenstockError as error:
        recorder.info(words_of(error))
        return None
    recorder.ok({**asked, "offset": offset})
    return offset


async def find(
    consumer: AsyncConsumer, partition: TopicPartition, wanted: Mapping[str, Any]
) -> int:
    """The offset that is wanted by ``offset``, ``timestamp`` or ``where``. Raises PenstockError."""
    if "offset" in wanted:
        return int(wanted["offset"])
    if "timestamp" in wanted:
        found = await consumer.offsets_for_times({partition: wanted["timestamp"]})
        place = found[partition]
        if place is not None:
            return place.offset
    elif wanted["where"] == "earliest":
        return (await consumer.beginning_offsets([partition]))[partition]
    return (await consumer.end_offsets([partition]))[partition]
