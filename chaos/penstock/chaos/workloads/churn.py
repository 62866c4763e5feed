"""The workload ``churn``: topics come and go under those who write to them and read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

from penstock.chaos.checkers import Checker
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.casting import Choices, Producer, append, option
from penstock.chaos.workloads.claims import GONE, Claim
from penstock.chaos.workloads.outcomes import is_refused, words_of
from penstock.chaos.workloads.reader import Reader
from penstock.chaos.workloads.values import ValueMaker
from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncProducer,
    PenstockError,
    TopicPartition,
)

_OPTIONS: Final[Choices] = {
    "topics": (3, 1, 100),
    "partitions": (2, 1, 100),
    "producers": (6, 0, 1_000),
    "readers": (2, 0, 100),
    "workers": (2, 1, 64),
}
_MOST_ADDED: Final = 2
"""Partitions that a topic may get beside those that it was made with."""
_PAUSE_S: Final = 0.05
_API_TIMEOUT_MS: Final = 8_000
_REQUEST_TIMEOUT_MS: Final = 4_000
_LIVES_S: Final = (0.5, 3.0)
"""Between two changes of a topic: so long producers and readers have it as it is."""
_WRITE_MS: Final = 10_000
_MARK: Final = 20
"""Records that the auditor writes to a topic that it has made anew."""


def _option(plan: Plan, name: str) -> int:
    return option(plan, "churn", _OPTIONS, name)


def topic_name(number: int) -> str:
    """The name of a topic that comes and goes."""
    return f"churn-{number}"


def next_change(random: Random, partitions: int, added: int) -> str:
    """What is done next to a topic that is there, of which so many partitions were added."""
    choices = ["delete", "delete", "reassign"]
    if added < _MOST_ADDED and partitions:
        choices.append("add-partitions")
    return random.choice(choices)


class Churn:
    """One operator changes each topic, so that it is always known which of its lives is meant."""

    name = "churn"
    summary = "topics deleted, made anew, given partitions and moved, under load"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Nothing: operators make the topics, so that the history tells of it."""

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """An operator for each topic, producers and readers of one each, and an auditor."""
        topics, workers = _option(plan, "topics"), _option(plan, "workers")
        partitions, producers = _option(plan, "partitions"), _option(plan, "producers")
        shape = {
            "partitions": partitions,
            "copies": min(3, max(1, plan.nodes - 1)),
            "nodes": plan.nodes,
        }
        specs = [
            ClientSpec(
                f"operator-{number}",
                "operator",
                number % workers,
                {**shape, "topic": topic_name(number), "number": number},
            )
            for number in range(topics)
        ]
        for number in range(producers):
            parameters = {
                "topic": topic_name(number % topics),
                "partitions": partitions,
                "home": number % partitions,
                "roams": True,
                "acks": "all",
                "idempotent": True,
                "delivery_timeout_ms": 3_000,
                "rate": plan.rate / producers or 500.0,
                "most": 50,
                "value_bytes": 60,
            }
            specs.append(ClientSpec(f"producer-{number}", "producer", number % workers, parameters))
        for number in range(_option(plan, "readers")):
            parameters = {"topic": topic_name(number % topics), "partitions": partitions}
            specs.append(ClientSpec(f"reader-{number}", "reader", number % workers, parameters))
        every = [topic_name(number) for number in range(topics)]
        specs.append(ClientSpec("auditor", "auditor", 0, {**shape, "topics": every, "number": 999}))
        return specs

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        match surroundings.spec.kind:
            case "operator":
                return _Operator(surroundings)
            case "producer":
                return Producer(surroundings)
            case "reader":
                return _Follower(surroundings)
            case _:
                return _Auditor(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of topics that come and go."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.registry import churn  # noqa: PLC0415 - see above.

        return churn()


def _admin(surroundings: Surroundings) -> AsyncAdminClient:
    return AsyncAdminClient(
        surroundings.bootstrap,
        client_id=surroundings.spec.process,
        default_api_timeout_ms=_API_TIMEOUT_MS,
        request_timeout_ms=_REQUEST_TIMEOUT_MS,
    )


async def _settle(claim: Claim) -> None:
    """Return when no deletion is left to be done."""
    while True:
        if await claim.settle():
            return
        await asyncio.sleep(_PAUSE_S)


async def _make(claim: Claim, parameters: Mapping[str, Any], copies: int) -> bool:
    """One operation: the topic; whether it is there now, and is the claim's."""
    asked = {"topic": claim.name, "partitions": parameters["partitions"]}
    return await claim.create(
        "create",
        asked,
        partitions=parameters["partitions"],
        replication_factor=copies,
    )


class _Operator:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder
        self._added = 0

    async def run(self) -> None:
        """Make the topic, change it, delete it, and again."""
        random, topic = self._surroundings.random, self._parameters["topic"]
        async with _admin(self._surroundings) as admin:
            claim = Claim.of(admin, self._surroundings, topic, self._parameters["number"])
            while True:
                await _settle(claim)
                if claim.topic_id is None:
                    self._added = 0
                    if not await _make(claim, self._parameters, self._parameters["copies"]):
                        await asyncio.sleep(_PAUSE_S)
                        continue
                await asyncio.sleep(random.uniform(*_LIVES_S))
                await self._change(admin, claim)

    async def finish(self) -> None:
        """Nothing: the auditor looks at what is left."""

    async def _change(self, admin: AsyncAdminClient, claim: Claim) -> None:
        random = self._surroundings.random
        match next_change(random, self._parameters["partitions"], self._added):
            case "delete":
                await claim.delete("delete", {"topic": claim.name})
            case "add-partitions":
                await self._add_partition(admin, claim)
            case _:
                await self._reassign(admin, claim)

    async def _add_partition(self, admin: AsyncAdminClient, claim: Claim) -> None:
        self._added += 1
        total = self._parameters["partitions"] + self._added
        asked = {"topic": claim.name, "partitions": total}
        self._recorder.invoke("add-partitions", asked)
        try:
            await admin.create_partitions(claim.name, total)
        except PenstockError as error:
            self._conclude(error)
            return
        self._recorder.ok(asked)

    async def _reassign(self, admin: AsyncAdminClient, claim: Claim) -> None:
        random = self._surroundings.random
        partition = TopicPartition(claim.name, random.randrange(self._parameters["partitions"]))
        nodes = range(1, self._parameters["nodes"] + 1)
        replicas = random.sample(list(nodes), self._parameters["copies"])
        asked = {"topic": claim.name, "partition": partition.partition, "replicas": replicas}
        self._recorder.invoke("reassign", asked)
        try:
            await admin.alter_partition_reassignments({partition: replicas})
        except PenstockError as error:
            self._conclude(error)
            return
        self._recorder.ok(asked)

    def _conclude(self, error: PenstockError) -> None:
        if is_refused(error):
            self._recorder.fail(words_of(error))
        else:
            self._recorder.info(words_of(error))


class _Follower(Reader):
    """Reads a topic for as long as it is there, and the next one of its name from the beginning."""

    async def finish(self) -> None:
        """Nothing: the auditor looks at what is left."""


class _Auditor:
    """Reads what is left in the end, then makes every topic anew once more and reads that.

    So something is judged of each topic also where faults left operators no time.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._recorder: Final[Recorder] = surroundings.recorder

    async def run(self) -> None:
        """Nothing: it waits for the end."""
        await asyncio.Event().wait()

    async def finish(self) -> None:
        """Look at every topic, one after the other."""
        async with _admin(self._surroundings) as admin:
            for number, topic in enumerate(self._parameters["topics"]):
                claim = Claim.of(admin, self._surroundings, topic, self._parameters["number"])
                await self._audit(admin, claim, number)

    async def _audit(self, admin: AsyncAdminClient, claim: Claim, number: int) -> None:
        found = await self._find(admin, claim)
        if found:
            await self._read(claim.name, found)
        else:
            await self._make_anew(admin, claim)
            await self._write(claim.name, f"auditor-{number}-first")
        await self._make_anew(admin, claim)
        await self._write(claim.name, f"auditor-{number}-second")
        await self._read(claim.name, self._parameters["partitions"])

    async def _find(self, admin: AsyncAdminClient, claim: Claim) -> int:
        """How many partitions the topic has, which is the claim's from now on; 0: it is not there.

        Nobody else changes topics any more, but for what is still under way.
        """
        while True:
            try:
                [topic] = await admin.describe_topics([claim.name])
            except GONE:
                return 0
            except PenstockError:
                await asyncio.sleep(_PAUSE_S)
                continue
            claim.topic_id = topic.topic_id
            return topic.partition_count

    async def _make_anew(self, admin: AsyncAdminClient, claim: Claim) -> None:
        """Operations, until a topic is there that was not there before."""
        while True:
            while await self._find(admin, claim):
                await claim.delete("delete", {"topic": claim.name})
                await _settle(claim)
            if await _make(claim, self._parameters, self._parameters["nodes"]):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _write(self, topic: str, name: str) -> None:
        """One operation a partition, again until one is acknowledged.

        It is so by every broker in sync, and those have heard of the topic before it then.
        """
        maker, first = ValueMaker(name, 60), 0
        producer = AsyncProducer(
            self._surroundings.bootstrap, client_id=name, delivery_timeout_ms=_WRITE_MS, linger_ms=0
        )
        async with producer:
            for partition in range(self._parameters["partitions"]):
                asked = {"topic": topic, "partition": partition, "producer": name, "acks": "all"}
                done = False
                while not done:
                    places = {**asked, "first": first, "count": _MARK}
                    done = await append(producer, self._recorder, places, maker)
                    first += _MARK

    async def _read(self, topic: str, partitions: int) -> None:
        parameters = {"topic": topic, "partitions": partitions}
        spec = replace(self._surroundings.spec, parameters=parameters)
        await Reader(replace(self._surroundings, spec=spec)).read_all()
