"""The workload ``retention``: what is written goes soon, and readers are too late for some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.casting import Choices, Producer, option, require_new
from penstock.chaos.workloads.reader import Reader
from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncConsumer,
    OffsetAndTimestamp,
    PenstockError,
    TopicPartition,
)

if TYPE_CHECKING:
    from penstock.chaos.checkers import Checker
    from penstock.chaos.checkers.registry import Settings

_OPTIONS: Final[Choices] = {
    "partitions": (3, 1, 1_000),
    "producers": (8, 1, 1_000),
    "readers": (1, 1, 100),
    "workers": (2, 1, 64),
    "value-bytes": (100, 0, 100_000),
    "segment-bytes": (65_536, 4_096, 1_000_000_000),
    "retention-bytes": (262_144, 0, 1_000_000_000),
    "retention-ms": (4_000, 1, 3_600_000),
}
BY_SIZE: Final = "retained-by-size"
BY_TIME: Final = "retained-by-time"
_TOPICS: Final = (BY_SIZE, BY_TIME)
_CHECK_MS: Final = 500
"""How often nodes look for what is to go."""
_PAUSE_S: Final = 0.05
_NAP_S: Final = (0.0, 8.0)
"""For so long readers stay behind now and then: longer than records are kept."""
_NAP_CHANCE: Final = 0.02
_STANDING_S: Final = 3.0
"""A log start that did not move for so long will not: brokers have heard that all is kept now."""
_MANY_RECORDS: Final = 500


def _option(plan: Plan, name: str) -> int:
    return option(plan, "retention", _OPTIONS, name)


class Retention:
    """Two topics: one keeps so many bytes, the other so many milliseconds."""

    name = "retention"
    summary = "appends to topics that keep little, and readers that are too late for some of it"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topics, of small segments."""
        copies = min(3, plan.nodes)
        kept = {
            BY_SIZE: {"retention.bytes": _option(plan, "retention-bytes"), "retention.ms": -1},
            BY_TIME: {"retention.ms": _option(plan, "retention-ms")},
        }
        for topic, configs in kept.items():
            require_new(admin, topic)
            admin.create_topic(
                topic,
                partitions=_option(plan, "partitions"),
                replication_factor=copies,
                configs={
                    "min.insync.replicas": max(1, copies - 1),
                    "segment.bytes": _option(plan, "segment-bytes"),
                    "max.message.bytes": min(_option(plan, "segment-bytes"), 1_048_588),
                    **configs,
                },
                if_not_exists=True,
            )

    def node_settings(self, plan: Plan) -> Mapping[str, str | int]:
        """Nodes that look often for what is to go."""
        del plan
        return {"log.retention.check.interval.ms": _CHECK_MS}

    def settings(self, plan: Plan) -> Settings:
        """What lies below where a log begins has expired."""
        from penstock.chaos.checkers.registry import Settings  # noqa: PLC0415 - as below.

        del plan
        return Settings(expiring=frozenset(_TOPICS))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Producers and readers of either topic."""
        partitions, workers = _option(plan, "partitions"), _option(plan, "workers")
        producers = _option(plan, "producers")
        specs = []
        for number in range(producers):
            parameters = {
                "topic": _TOPICS[number % 2],
                "partitions": partitions,
                "home": number // 2 % partitions,
                "roams": number // 2 % 2 == 1,
                "acks": "all",
                "idempotent": True,
                "delivery_timeout_ms": 10_000,
                "rate": plan.rate / producers,
                "most": 100,
                "value_bytes": _option(plan, "value-bytes"),
            }
            specs.append(ClientSpec(f"producer-{number}", "producer", number % workers, parameters))
        for number in range(2 * _option(plan, "readers")):
            parameters = {"topic": _TOPICS[number % 2], "partitions": partitions}
            specs.append(ClientSpec(f"reader-{number}", "reader", number % workers, parameters))
        return specs

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        if surroundings.spec.kind == "producer":
            return Producer(surroundings)
        return _LateReader(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs, of which what lies below the start has expired."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.registry import appends  # noqa: PLC0415 - see above.

        return appends(self.settings(plan))


class _LateReader(Reader):
    """Reads little at a time, and naps: where it was is gone by then, and it begins where the log
    does (``auto_offset_reset``).
    """

    _is_final = False

    def _consumer(self) -> AsyncConsumer:
        return AsyncConsumer(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            # In the end nothing goes any more: what is missing then is to be told.
            auto_offset_reset="none" if self._is_final else "earliest",
            max_poll_records=_MANY_RECORDS,
            default_api_timeout_ms=5_000,
            request_timeout_ms=2_000,
            metadata_max_age_ms=30_000,
        )

    async def run(self) -> None:
        """Read for ever."""
        random = self._surroundings.random
        consumer = await self.begin()
        try:
            while True:
                if random.random() < _NAP_CHANCE:
                    await asyncio.sleep(random.uniform(*_NAP_S))
                if not await self.poll(consumer):
                    await asyncio.sleep(_PAUSE_S)
        finally:
            await consumer.close(timeout_ms=0)

    async def finish(self) -> None:
        """Have everything kept from now on, and read it all."""
        self._is_final = True
        await self._keep_all()
        await self.read_all()

    async def _keep_all(self) -> None:
        name = self._surroundings.spec.process
        async with AsyncAdminClient(
            self._surroundings.bootstrap, client_id=name, default_api_timeout_ms=5_000
        ) as admin:
            kept = {"retention.ms": -1, "retention.bytes": -1}
            while True:
                try:
                    await admin.alter_configs(self._topic, kept)
                    break
                except PenstockError:
                    await asyncio.sleep(_PAUSE_S)
            starts: dict[TopicPartition, OffsetAndTimestamp] = {}
            since = time.monotonic()
            while time.monotonic() - since < _STANDING_S:
                await asyncio.sleep(_PAUSE_S)
                try:
                    found = await admin.list_offsets(dict.fromkeys(self._partitions, "earliest"))
                except PenstockError:
                    since = time.monotonic()
                    continue
                if found != starts:
                    starts, since = found, time.monotonic()
