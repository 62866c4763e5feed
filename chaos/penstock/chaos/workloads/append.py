"""The workload ``append``: producers of all kinds write, and readers read, seek and re-read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.chaos.checkers import Checker
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, casting
from penstock.chaos.workloads.casting import Choices, Producer, make_topic
from penstock.chaos.workloads.reader import Reader
from penstock.client import AdminClient

TOPIC: Final = "appends"
_OPTIONS: Final[Choices] = {
    # name: default, least, most
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
_UNBOUND_RATES: Final[Mapping[str, float]] = {"1": 2_000, "0": 1_000}
"""Records a second of producers that do not wait for all replicas, where no rate is asked for: they
would take the machine from those that do, and prove less."""


class Append:
    """Independent logs: each record has its producer, and its number in it by partition.

    Producers without idempotence never retry, so that no duplicates come of any of them.
    """

    name = "append"
    summary = "producers with acks=all, 1 and 0, idempotent or not; readers that seek"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic, with as many copies as there can usefully be."""
        make_topic(admin, plan, TOPIC, _option(plan, "partitions"))

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


def _option(plan: Plan, name: str) -> int:
    return casting.option(plan, Append.name, _OPTIONS, name)
