"""The workload ``compacted``: values and tombstones by key, in topics that are compacted a lot."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.casting import Choices, Pace, option, require_new
from penstock.chaos.workloads.outcomes import is_certain, words_of
from penstock.client import (
    AdminClient,
    AsyncConsumer,
    AsyncProducer,
    ConsumerRecord,
    PenstockError,
    TopicPartition,
)

if TYPE_CHECKING:
    from penstock.chaos.checkers import Checker
    from penstock.chaos.checkers.registry import Settings

TOPIC: Final = "compacted"
_OPTIONS: Final[Choices] = {
    "partitions": (2, 1, 1_000),
    "writers": (8, 1, 1_000),
    "keys": (5, 1, 100_000),
    "scanners": (2, 1, 100),
    "workers": (2, 1, 64),
    "value-bytes": (400, 0, 100_000),
    "segment-bytes": (16_384, 4_096, 1_000_000_000),
    "lag-ms": (2_000, 100, 3_600_000),
}
_PAUSE_S: Final = 0.05
_SCAN_EVERY_S: Final = 0.5
_TOMBSTONES: Final = 0.15
_LEAST_RETENTION_MS: Final = 3_600_000
_NUMBER: Final = "number"
"""The header that tells which put of its key a record is: tombstones have nothing else."""
_REQUEST_TIMEOUT_MS: Final = 2_000
_DELIVERY_TIMEOUT_MS: Final = 10_000


def _option(plan: Plan, name: str) -> int:
    return option(plan, "compacted", _OPTIONS, name)


def delete_retention_ms(duration_s: float) -> int:
    """For how long tombstones stay: longer than a run of that duration can be, healing and all.

    What no scan finds is judged as never deleted; and a replica that is away for longer than
    tombstones stay may bring keys back, which is promised to nobody.
    """
    return max(_LEAST_RETENTION_MS, int(duration_s * 1000) * 4)


class Compacted:
    """Each key has one writer, who numbers what it puts."""

    name = "compacted"
    summary = "values and tombstones by key into compacted topics, and scans of them"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic, of small segments that are cleaned as soon as they may be."""
        require_new(admin, TOPIC)
        copies = min(3, plan.nodes)
        admin.create_topic(
            TOPIC,
            partitions=_option(plan, "partitions"),
            replication_factor=copies,
            configs={
                "cleanup.policy": "compact",
                "min.insync.replicas": max(1, copies - 1),
                "segment.bytes": _option(plan, "segment-bytes"),
                "max.message.bytes": min(_option(plan, "segment-bytes"), 1_048_588),
                "min.cleanable.dirty.ratio": 0.01,
                # See _Scanner. By the leader's time: a producer's is when it was asked first.
                "min.compaction.lag.ms": _option(plan, "lag-ms"),
                "message.timestamp.type": "LogAppendTime",
                "delete.retention.ms": delete_retention_ms(plan.duration_s),
            },
            if_not_exists=True,
        )

    def node_settings(self, plan: Plan) -> Mapping[str, str | int]:
        """Cleaners that hardly rest."""
        del plan
        return {"log.cleaner.backoff.ms": 200}

    def settings(self, plan: Plan) -> Settings:
        """Replicas differ: each one cleans for itself."""
        from penstock.chaos.checkers.registry import Settings  # noqa: PLC0415 - as below.

        del plan
        return Settings(compacted=frozenset({TOPIC}))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Writers with keys of their own, and scanners of all partitions."""
        partitions, workers = _option(plan, "partitions"), _option(plan, "workers")
        writers = _option(plan, "writers")
        specs = []
        for number in range(writers):
            parameters = {
                "partition": number % partitions,
                "keys": _option(plan, "keys"),
                "rate": plan.rate / writers,
                "value_bytes": _option(plan, "value-bytes"),
            }
            specs.append(ClientSpec(f"writer-{number}", "writer", number % workers, parameters))
        for number in range(_option(plan, "scanners")):
            parameters = {"partitions": partitions, "lag_ms": _option(plan, "lag-ms")}
            name, worker = f"scanner-{number}", (writers + number) % workers
            specs.append(ClientSpec(name, "scanner", worker, parameters))
        return specs

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        return (_Writer if surroundings.spec.kind == "writer" else _Scanner)(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of compaction."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.registry import compacted  # noqa: PLC0415 - see above.

        return compacted()


class _Writer:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder

    async def run(self) -> None:
        """Put values and tombstones, one after the other."""
        random, name = self._surroundings.random, self._surroundings.spec.process
        padding = b"." * self._parameters["value_bytes"]
        pace, number = Pace(self._parameters["rate"]), 0
        producer = AsyncProducer(
            self._surroundings.bootstrap,
            client_id=name,
            delivery_timeout_ms=_DELIVERY_TIMEOUT_MS,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
            max_block_ms=5_000,
            linger_ms=0,
        )
        try:
            while True:
                number += 1
                asked = {
                    "topic": TOPIC,
                    "partition": self._parameters["partition"],
                    "key": f"{name}-{random.randrange(self._parameters['keys'])}",
                    "number": number,
                    "tombstone": random.random() < _TOMBSTONES,
                }
                await pace.wait(1)
                if not await self._put(producer, asked, padding):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            with contextlib.suppress(PenstockError):
                await producer.close(timeout_ms=0)

    async def finish(self) -> None:
        """Nothing: scanners read it all."""

    async def _put(self, producer: AsyncProducer, asked: Mapping[str, Any], padding: bytes) -> bool:
        """One operation; whether it was acknowledged."""
        self._recorder.invoke("put", asked)
        try:
            future = await producer.send(
                TOPIC,
                None if asked["tombstone"] else padding,
                asked["key"].encode(),
                [(_NUMBER, str(asked["number"]).encode())],
                partition=asked["partition"],
            )
            placed = await future
        except PenstockError as error:
            if is_certain(error):
                self._recorder.fail(words_of(error))
            else:
                self._recorder.info(words_of(error))
            return False
        # Sent again, and no longer remembered by the broker: it is there, but nobody knows where.
        self._recorder.ok({**asked, **({"offset": placed.offset} if placed.offset >= 0 else {})})
        return True


def entry_of(record: ConsumerRecord) -> list[Any]:
    """``[offset, key, number]``; what nobody of us wrote has a number that none has."""
    numbers = [value for name, value in record.headers if name == _NUMBER and value is not None]
    key = (record.key or b"").decode(errors="replace")
    number = int(numbers[0]) if len(numbers) == 1 and numbers[0].isdigit() else -1
    return [record.offset, key, number]


class _Scanner:
    """Scans partitions by turns.

    A scan that goes on while the log is cleaned could miss a key altogether: it comes past where
    the key's last value was when that is gone, since a newer one is beyond the end of the scan. So
    it reads up to the end as it is asked for first, and then up to the end as it is then; and it
    counts only where all that took less than the time for which nothing new is compacted. A newer
    value beyond the second end was appended meanwhile, and is too young to replace anything; or it
    was not committed until then, and could replace nothing while the scan came by.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder

    async def run(self) -> None:
        """Scan partitions by chance."""
        random = self._surroundings.random
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * _SCAN_EVERY_S)
            partition = random.randrange(self._parameters["partitions"])
            await self._scan(partition, within_s=self._parameters["lag_ms"] / 1000)

    async def finish(self) -> None:
        """Scan every partition once more. Nobody writes any more: it may take its time."""
        for partition in range(self._parameters["partitions"]):
            while True:
                if await self._scan(partition, within_s=float("inf")):
                    break
                await asyncio.sleep(_PAUSE_S)

    async def _scan(self, partition: int, *, within_s: float) -> bool:
        """One operation; whether it was answered."""
        asked = {"topic": TOPIC, "partition": partition}
        self._recorder.invoke("scan", asked)
        began = time.monotonic()
        consumer = AsyncConsumer(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            auto_offset_reset="none",
            default_api_timeout_ms=5_000,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
        )
        try:
            entries, end = await self._read(consumer, TopicPartition(TOPIC, partition), within_s)
        except (PenstockError, TimeoutError) as error:
            self._recorder.info(words_of(error))
            return False
        finally:
            with contextlib.suppress(PenstockError):
                await consumer.close(timeout_ms=0)
        if time.monotonic() - began >= within_s:
            self._recorder.info("TOO_SLOW: it may have missed what was replaced meanwhile")
            return False
        self._recorder.ok({**asked, "entries": entries, "end": end})
        return True

    @staticmethod
    async def _read(
        consumer: AsyncConsumer, partition: TopicPartition, within_s: float
    ) -> tuple[list[list[Any]], int]:
        """What the log holds, and up to which offset. Raises TimeoutError, PenstockError."""
        entries: list[list[Any]] = []
        end = 0
        async with asyncio.timeout(None if within_s == float("inf") else within_s):
            await consumer.assign([partition])
            await consumer.seek(
                partition, (await consumer.beginning_offsets([partition]))[partition]
            )
            for _ in range(2):
                end = (await consumer.end_offsets([partition]))[partition]
                while await consumer.position(partition) < end:
                    entries += map(entry_of, await consumer.poll(timeout_ms=500))
        # What came beside it was read as well, and is told to where it was read.
        return entries, max(end, await consumer.position(partition))
