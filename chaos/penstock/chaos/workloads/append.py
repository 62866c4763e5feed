"""The workload ``append``: producers of all kinds write, and readers read, seek and re-read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from penstock.chaos.checkers import Checker
from penstock.chaos.errors import PlanError
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.outcomes import is_certain, words_of
from penstock.chaos.workloads.values import ValueMaker, runs_of
from penstock.client import (
    AdminClient,
    AsyncConsumer,
    AsyncProducer,
    PenstockError,
    RecordMetadata,
    TopicPartition,
)

TOPIC: Final = "appends"
Choices = Mapping[str, tuple[int, int, int]]
"""The options of a workload: by name the default, the least and the most."""

_OPTIONS: Final[Choices] = {
    "partitions": (6, 1, 1_000),
    "producers": (12, 1, 1_000),
    "readers": (1, 1, 100),
    "workers": (2, 1, 64),
    "value-bytes": (100, 0, 1_000_000),
    "most-in-a-run": (200, 1, 10_000),
}
_KINDS: Final[Sequence[Mapping[str, Any]]] = (
    # Those that give up soon are often told nothing certain. One that roams writes to all
    # partitions; others to one each, so that where that hangs only they do.
    {"acks": "all", "idempotent": True, "delivery_timeout_ms": 30_000},
    {"acks": "all", "idempotent": True, "delivery_timeout_ms": 3_000},
    {"acks": "all", "idempotent": True, "delivery_timeout_ms": 10_000},
    {"acks": "all", "idempotent": False, "delivery_timeout_ms": 10_000},
    {"acks": "all", "idempotent": True, "delivery_timeout_ms": 30_000, "roams": True},
    {"acks": "1", "idempotent": False, "delivery_timeout_ms": 10_000},
    {"acks": "all", "idempotent": True, "delivery_timeout_ms": 5_000},
    {"acks": "0", "idempotent": False, "delivery_timeout_ms": 10_000},
)
_PAUSE_S: Final = 0.05
"""After an operation that failed, as applications do."""
_REQUEST_TIMEOUT_MS: Final = 2_000
_UNBOUND_RATES: Final[Mapping[str, float]] = {"1": 2_000, "0": 1_000}
"""Records a second of producers that do not wait for all replicas, where no rate is asked for: they
would take the machine from those that do, and prove less."""
_SEEK_EVERY_S: Final = 2.0
_SEEK_BACK: Final = 2_000
"""So many records, or milliseconds, a seek goes back at most, but for those to the beginning: who
reads again and again what is long ago never gets to what is new."""
_EARLIEST_CHANCE: Final = 0.05


class Append:
    """Independent logs: each record has its producer, and its number in it by partition.

    Producers without idempotence never retry, so that no duplicates come of any of them.
    """

    name = "append"
    summary = "producers with acks=all, 1 and 0, idempotent or not; readers that seek"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic, with as many copies as there can usefully be."""
        copies = min(3, plan.nodes)
        admin.create_topic(
            TOPIC,
            partitions=_option(plan, "partitions"),
            replication_factor=copies,
            configs={"min.insync.replicas": max(1, copies - 1)},
            if_not_exists=True,
        )

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Producers, most of one partition each, and readers, each of all partitions."""
        partitions, workers = _option(plan, "partitions"), _option(plan, "workers")
        producers, readers = _option(plan, "producers"), _option(plan, "readers")
        specs = []
        for number in range(producers):
            kind = _KINDS[number % len(_KINDS)]
            unbound = _UNBOUND_RATES.get(str(kind["acks"]), 0.0)
            parameters = {
                **kind,
                "topic": TOPIC,
                "partitions": partitions,
                "home": number % partitions,
                "rate": plan.rate / producers or unbound,
                "most": _option(plan, "most-in-a-run"),
                "value_bytes": _option(plan, "value-bytes"),
            }
            name = f"producer-{number}"
            specs.append(ClientSpec(name, "producer", number % workers, parameters))
        for number in range(readers):
            name = f"reader-{number}"
            parameters = {"topic": TOPIC, "partitions": partitions, "seeks": True}
            specs.append(ClientSpec(name, "reader", (producers + number) % workers, parameters))
        return specs

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        if surroundings.spec.kind == "producer":
            return Producer(surroundings)
        return Reader(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs, whatever the plan."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.lost import AcksLevels  # noqa: PLC0415 - see above.
        from penstock.chaos.checkers.registry import appends  # noqa: PLC0415 - see above.
        from penstock.chaos.checkers.seeks import SeekHonoured  # noqa: PLC0415 - see above.

        return [*appends(), AcksLevels(), SeekHonoured()]


def option(plan: Plan, workload: str, choices: Choices, name: str) -> int:
    """An option of the workload. Raises PlanError where it is none, or not as it may be."""
    unknown = sorted(set(plan.options) - set(choices))
    if unknown:
        raise PlanError(
            f"the workload {workload} has no option {unknown[0]!r}; next: take one of "
            f"{', '.join(sorted(choices))}"
        )
    default, least, most = choices[name]
    try:
        value = int(plan.options.get(name, default))
    except (TypeError, ValueError):
        value = least - 1
    if not least <= value <= most:
        raise PlanError(
            f"the option {name}={plan.options[name]!r} is no whole number from {least} to {most}; "
            "next: choose another"
        )
    return value


def _option(plan: Plan, name: str) -> int:
    return option(plan, "append", _OPTIONS, name)


class Pace:
    """Times for operations such that so many a second are asked for; 0: as many as there can be."""

    def __init__(self, rate: float) -> None:
        self._rate: Final = rate
        self._at = time.monotonic()

    async def wait(self, count: int) -> None:
        """Return when ``count`` more may be asked for. What was missed is not made up for."""
        now = time.monotonic()
        if self._rate <= 0:
            await asyncio.sleep(0)
            return
        self._at = max(self._at, now - 1.0) + count / self._rate
        await asyncio.sleep(max(0.0, self._at - now))


class Producer:
    """Appends runs of records to its home, or all over the topic, at its pace.

    Parameters of its specification: ``topic``, ``partitions``, ``home``, ``roams``, ``acks``,
    ``idempotent``, ``delivery_timeout_ms``, ``rate``, ``most`` (records in a run), ``value_bytes``.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder
        self._name: Final = surroundings.spec.process
        self._maker: Final = ValueMaker(self._name, self._parameters["value_bytes"])
        self._next: Final = [0] * self._parameters["partitions"]

    async def run(self) -> None:
        """Do so for ever."""
        random, most = self._surroundings.random, self._parameters["most"]
        pace = Pace(self._parameters["rate"])
        producer = AsyncProducer(self._surroundings.bootstrap, **self._settings())
        try:
            while True:
                partition = self._parameters["home"]
                if self._parameters.get("roams"):
                    partition = random.randrange(len(self._next))
                count = random.randint(max(1, most // 4), most)
                await pace.wait(count)
                if not await self._append(producer, partition, count):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            # What is under way stays ambiguous: nobody waits for it.
            with contextlib.suppress(PenstockError):
                await producer.close(timeout_ms=0)

    async def finish(self) -> None:
        """Nothing: readers read it all."""

    def _settings(self) -> dict[str, Any]:
        acks: Literal["all", 0, 1] = "all"
        if self._parameters["acks"] != "all":
            acks = 1 if self._parameters["acks"] == "1" else 0
        idempotent = bool(self._parameters["idempotent"])
        return {
            "client_id": self._name,
            "acks": acks,
            "enable_idempotence": idempotent,
            "delivery_timeout_ms": self._parameters["delivery_timeout_ms"],
            "request_timeout_ms": _REQUEST_TIMEOUT_MS,
            "max_block_ms": 5_000,
            "linger_ms": 0,
            "metadata_max_age_ms": 30_000,
            **({} if idempotent else {"retries": 0}),
        }

    async def _append(self, producer: AsyncProducer, partition: int, count: int) -> bool:
        """One operation; whether all of it was acknowledged."""
        first = self._next[partition]
        self._next[partition] += count
        asked = {
            "topic": self._parameters["topic"],
            "partition": partition,
            "producer": self._name,
            "acks": self._parameters["acks"],
            "first": first,
            "count": count,
        }
        return await append(producer, self._recorder, asked, self._maker)


async def append(
    producer: AsyncProducer, recorder: Recorder, asked: Mapping[str, Any], maker: ValueMaker
) -> bool:
    """One operation, with what is ``asked`` as its value; whether all of it was acknowledged."""
    recorder.invoke("append", asked)
    try:
        values = maker.values(asked["first"], asked["count"])
        future = await producer.send_many(asked["topic"], values, partition=asked["partition"])
        outcomes = await future.outcomes()
    except PenstockError as error:
        # Some may have been queued before it was raised.
        recorder.info(words_of(error))
        return False
    return _conclude(recorder, asked, outcomes)


def _conclude(
    recorder: Recorder, asked: Mapping[str, Any], outcomes: Sequence[RecordMetadata | BaseException]
) -> bool:
    errors = [one for one in outcomes if isinstance(one, BaseException)]
    runs = _acknowledged(asked["first"], outcomes) if asked["acks"] != "0" else []
    if not errors:
        recorder.ok({**asked, "runs": runs})
        return True
    doubt = next((error for error in errors if not is_certain(error)), None)
    if len(errors) == len(outcomes) and doubt is None:
        recorder.fail(words_of(errors[0]))
    else:
        recorder.info(words_of(doubt or errors[0]), {**asked, "runs": runs})
    return False


def _acknowledged(
    first: int, outcomes: Sequence[RecordMetadata | BaseException]
) -> list[list[int]]:
    """``[first, count, offset]`` of what was acknowledged, as the broker said, in order."""
    runs: list[list[int]] = []
    for number, one in enumerate(outcomes, first):
        if isinstance(one, BaseException):
            continue
        offset = one.offset
        if runs:
            last = runs[-1]
            follows = offset == -1 == last[2] or (last[2] >= 0 and offset == last[2] + last[1])
            if number == last[0] + last[1] and follows:
                last[1] += 1
                continue
        runs.append([number, 1, offset])
    return runs


class Reader:
    """Reads all partitions of a topic. Parameters of its specification: ``topic``, ``partitions``
    and ``seeks``.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._recorder: Final[Recorder] = surroundings.recorder
        parameters = surroundings.spec.parameters
        self._topic: Final[str] = parameters["topic"]
        self._partitions: Final = [
            TopicPartition(self._topic, number) for number in range(parameters["partitions"])
        ]
        self._positions: Final[dict[str, int]] = {}

    def _consumer(self) -> AsyncConsumer:
        return AsyncConsumer(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            auto_offset_reset="earliest",
            max_poll_records=5_000,
            default_api_timeout_ms=5_000,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
        )

    async def run(self) -> None:
        """Do so for ever."""
        random, seeks = self._surroundings.random, self._surroundings.spec.parameters.get("seeks")
        consumer = await self.begin()
        try:
            seek_at = time.monotonic() + _SEEK_EVERY_S
            while True:
                if seeks and time.monotonic() >= seek_at:
                    await self._seek(consumer)
                    seek_at = time.monotonic() + random.uniform(0.5, 1.5) * _SEEK_EVERY_S
                if not await self.poll(consumer):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            with contextlib.suppress(PenstockError):
                await consumer.close(timeout_ms=0)

    async def finish(self) -> None:
        """Read every partition from its beginning to its end."""
        await self.read_all()

    async def read_all(self) -> None:
        """Read every partition from its beginning to its end."""
        consumer = await self.begin()
        try:
            for partition in self._partitions:
                await self._rewind(consumer, partition)
            left = await self._ends(consumer)
            while left:
                await self.poll(consumer, ends=left)
                for name in [one for one in left if self._positions[one] >= left[one]]:
                    del left[name]
        finally:
            with contextlib.suppress(PenstockError):
                await consumer.close(timeout_ms=0)

    async def _rewind(self, consumer: AsyncConsumer, partition: TopicPartition) -> None:
        """Go to the beginning, as soon as its leader can be asked for it."""
        while True:
            if await self._seek_to(consumer, partition, {"where": "earliest"}):
                return
            await asyncio.sleep(_PAUSE_S)

    async def begin(self) -> AsyncConsumer:
        """A consumer at the beginning of all partitions, as soon as there is a way to one."""
        while True:
            consumer = self._consumer()
            try:
                await consumer.assign(self._partitions)
            except PenstockError:
                with contextlib.suppress(PenstockError):
                    await consumer.close(timeout_ms=0)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._positions.update({str(one): 0 for one in self._partitions})
            return consumer

    async def _ends(self, consumer: AsyncConsumer) -> dict[str, int]:
        """Where each partition ends, as soon as the leaders of all can be asked."""
        while True:
            try:
                ends = await consumer.end_offsets(self._partitions)
            except PenstockError:
                await asyncio.sleep(_PAUSE_S)
                continue
            return {str(partition): end for partition, end in ends.items()}

    async def poll(self, consumer: AsyncConsumer, ends: Mapping[str, int] | None = None) -> bool:
        """One operation; whether it brought something."""
        asked = {
            "topic": self._topic,
            "positions": dict(self._positions),
            "isolation": "read_uncommitted",
        }
        self._recorder.invoke("poll", asked)
        try:
            batches = await consumer.poll_batch(timeout_ms=500)
            lags = (await consumer.metrics()).records_lag
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        runs = runs_of(
            (record.partition, record.offset, record.value)
            for records in batches.values()
            for record in records
        )
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
        return bool(runs)

    async def _seek(self, consumer: AsyncConsumer) -> None:
        """One operation: somewhere by chance."""
        random = self._surroundings.random
        partition = random.choice(self._partitions)
        back = random.randint(0, _SEEK_BACK)
        where = random.choice(("latest", "offset", "timestamp"))
        wanted: dict[str, Any] = {"where": "latest"}
        if random.random() < _EARLIEST_CHANCE:
            wanted = {"where": "earliest"}
        elif where == "offset":
            wanted = {"offset": max(0, self._positions[str(partition)] - back)}
        elif where == "timestamp":
            wanted = {"timestamp": int(time.time() * 1000) - back}
        await self._seek_to(consumer, partition, wanted)

    async def _seek_to(
        self, consumer: AsyncConsumer, partition: TopicPartition, wanted: Mapping[str, Any]
    ) -> bool:
        """One operation; whether it was done."""
        asked = {"topic": self._topic, "partition": partition.partition, **wanted}
        self._recorder.invoke("seek", asked)
        try:
            offset = await self._find(consumer, partition, asked)
            await consumer.seek(partition, offset)
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        self._positions[str(partition)] = offset
        self._recorder.ok({**asked, "offset": offset})
        return True

    async def _find(
        self, consumer: AsyncConsumer, partition: TopicPartition, asked: Mapping[str, Any]
    ) -> int:
        if "offset" in asked:
            return int(asked["offset"])
        if "timestamp" in asked:
            found = await consumer.offsets_for_times({partition: asked["timestamp"]})
            place = found[partition]
            if place is not None:
                return place.offset
        elif asked["where"] == "earliest":
            return (await consumer.beginning_offsets([partition]))[partition]
        return (await consumer.end_offsets([partition]))[partition]
