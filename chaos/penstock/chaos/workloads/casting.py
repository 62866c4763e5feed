"""Who plays in a workload, and how: what the clients of several workloads have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from penstock.chaos.errors import ClusterError, PlanError
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.outcomes import is_certain, words_of
from penstock.chaos.workloads.values import ValueMaker
from penstock.client import (
    AdminClient,
    AsyncConsumer,
    AsyncProducer,
    PenstockError,
    RecordMetadata,
)

PAUSE_S: Final = 0.05
"""After an operation that failed, as applications do."""
REQUEST_TIMEOUT_MS: Final = 2_000
API_TIMEOUT_MS: Final = 5_000

Choices = Mapping[str, tuple[int, int, int]]
"""The options of a workload: by name the default, the least and the most."""


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


def require_new(admin: AdminClient, topic: str) -> None:
    """Raise ClusterError where it is there: nodes that run before and after keep what a run wrote,
    and the next one would take that for its own.
    """
    if any(one.name == topic for one in admin.list_topics()):
        raise ClusterError(
            f"the topic {topic} is there already, as an earlier run left it: what is in it would "
            f"be judged as this run's; next: `penstock topics delete {topic}`"
        )


def make_topic(admin: AdminClient, plan: Plan, topic: str, partitions: int) -> None:
    """Make it, with as many copies as there can usefully be. Raises ClusterError where it is."""
    require_new(admin, topic)
    copies = min(3, plan.nodes)
    admin.create_topic(
        topic,
        partitions=partitions,
        replication_factor=copies,
        configs={"min.insync.replicas": max(1, copies - 1)},
        if_not_exists=True,
    )


def careful_producers(
    count: int, *, topic: str, partitions: int, workers: int, rate: float, **more: Any
) -> list[ClientSpec]:
    """Specifications of idempotent producers with ``acks=all``, spread over partitions and workers.

    ``rate`` is that of all together, in records a second. ``more`` goes to each.
    """
    return [
        ClientSpec(
            f"producer-{number}",
            "producer",
            number % workers,
            {
                "topic": topic,
                "partitions": partitions,
                "home": number % partitions,
                "roams": number % 2 == 1 or count < partitions,
                "acks": "all",
                "idempotent": True,
                "delivery_timeout_ms": 10_000,
                "rate": rate / count,
                "most": 50,
                "value_bytes": 60,
                **more,
            },
        )
        for number in range(count)
    ]


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


async def shut(client: AsyncProducer | AsyncConsumer, timeout_ms: float = 0) -> None:
    """Close it, however it is: what it has under way stays ambiguous, and nobody waits for it."""
    with contextlib.suppress(PenstockError):
        await client.close(timeout_ms=timeout_ms)


class Producer:
    """A client that appends runs of records, to its home or all over the topic, at its pace.

    Parameters of its specification: ``topic``, ``partitions``, ``home``, ``roams``, ``acks``,
    ``idempotent``, ``delivery_timeout_ms``, ``rate``, ``most`` (records in a run), ``value_bytes``
    and ``dated``: whether records are given the time at which they are sent.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder
        self._name: Final = surroundings.spec.process
        self._maker: Final = ValueMaker(self._name, self._parameters["value_bytes"])
        self._next: Final = [0] * self._parameters["partitions"]

    async def run(self) -> None:
        """Append for ever."""
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
                    await asyncio.sleep(PAUSE_S)
        finally:
            await shut(producer)

    async def finish(self) -> None:
        """Nothing: readers read it all."""

    def _settings(self) -> dict[str, Any]:
        acks: Literal["all", 0, 1] = "all"
        if self._parameters["acks"] != "all":
            acks = 1 if self._parameters["acks"] == "1" else 0
        idempotent = bool(self._parameters["idempotent"])
        return {
            **producer_settings(self._name, self._parameters["delivery_timeout_ms"]),
            "acks": acks,
            "enable_idempotence": idempotent,
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
        if self._parameters.get("dated"):
            asked["timestamp"] = int(time.time() * 1000)
        return await append(producer, self._recorder, asked, self._maker)


def producer_settings(name: str, delivery_timeout_ms: int) -> dict[str, Any]:
    """What all producers of the harness have in common."""
    return {
        "client_id": name,
        "delivery_timeout_ms": delivery_timeout_ms,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "max_block_ms": API_TIMEOUT_MS,
        "linger_ms": 0,
        "metadata_max_age_ms": 30_000,
    }


async def append(
    producer: AsyncProducer, recorder: Recorder, asked: Mapping[str, Any], maker: ValueMaker
) -> bool:
    """One operation, with what is ``asked`` as its value; whether all of it was acknowledged."""
    recorder.invoke("append", asked)
    try:
        values = maker.values(asked["first"], asked["count"])
        future = await producer.send_many(
            asked["topic"],
            values,
            partition=asked["partition"],
            timestamp_ms=asked.get("timestamp"),
        )
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
    runs = acknowledged(asked["first"], outcomes) if asked["acks"] != "0" else []
    if not errors:
        recorder.ok({**asked, "runs": runs})
        return True
    doubt = next((error for error in errors if not is_certain(error)), None)
    if len(errors) == len(outcomes) and doubt is None:
        recorder.fail(words_of(errors[0]))
    else:
        recorder.info(words_of(doubt or errors[0]), {**asked, "runs": runs})
    return False


def acknowledged(first: int, outcomes: Sequence[RecordMetadata | BaseException]) -> list[list[int]]:
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
