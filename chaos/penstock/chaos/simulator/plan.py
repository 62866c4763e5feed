"""What a seed draws before a run begins, but for the times of its faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from penstock.broker.core.transaction_values import LAST_EPOCH
from penstock.chaos.simulator.faults import (
    DAMAGED_LOG,
    KINDS,
    SAFE_KINDS,
    TRANSACTION_KINDS,
)

_ALWAYS: Final = 0.3  # In so many runs everything may go wrong that can.
_DAMAGED: Final = 0.3  # In so many some logs do not open.
_QUIET: Final = 0.125  # In so many it is quiet for a while.
_QUIET_MS: Final = (30_000, 60_000, 120_000)
_LEAST_EXPIRATION_MS: Final = 15_000
"""Producers are remembered for longer than anything that they sent is on its way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run's cluster, topic and the kinds of what goes wrong.

    ``min_isr`` is None where the topic has the default, which goes by the number of replicas.
    ``flush_policy`` is commit, interval or os. ``unclean``: the topic allows elections that may
    lose records, and an operator orders some. ``hands_over``: leaders hand over what they know of
    producers to who begins anew; else there are too many of them. ``late``: the share of requests
    that are overtaken; ``left_over``: of those to controllers and of what producers send, the share
    that arrives once more long after its call was given up. ``transactions``: what clients write
    are transactions, and nothing happens by which acknowledged records may be lost;
    Before the end it is quiet for ``quiet_ms``. Brokers forget producers that were silent for
    ``producer_expiration_ms``, and delete records that are older than ``retention_ms``; 0 is never.
    ``last_epoch``: of their producers; ``timeout_ms``: of each transaction; ``too_large``: of the
    records by which coordinators take partitions in the share that their log refuses; ``cast``: the
    roles of the clients that write transactions, empty for all of them.
    """

    nodes: tuple[int, ...]
    partitions: int
    min_isr: int | None
    flush_policy: str
    unclean: bool
    kinds: frozenset[str]
    hands_over: bool
    late: float = 0.02
    left_over: float = 0.02
    transactions: bool = False
    last_epoch: int = LAST_EPOCH
    timeout_ms: int = 1000
    too_large: float = 0.0
    cast: tuple[str, ...] = ()
    quiet_ms: int = 0
    producer_expiration_ms: int = 0
    retention_ms: int = 0

    def __str__(self) -> str:
        unclean = ", unclean elections" if self.unclean else ""
        many = "" if self.hands_over else ", more producers than are handed over"
        min_isr = "unset" if self.min_isr is None else self.min_isr
        what = ", transactions" if self.transactions else ""
        what += f" of {self.last_epoch} epochs" if self.last_epoch < LAST_EPOCH else ""
        what += f" by {', '.join(self.cast)}" if self.cast else ""
        what += f", quiet for {self.quiet_ms // 1000} s" if self.quiet_ms else ""
        ages = (("producers", self.producer_expiration_ms), ("records", self.retention_ms))
        what += "".join(f", {name} gone after {ms // 1000} s" for name, ms in ages if ms)
        return (
            f"{len(self.nodes)} nodes, {self.partitions} partitions, min.insync.replicas "
            f"{min_isr}, flush.policy {self.flush_policy}{unclean}{many}{what}; of "
            f"{len(self.kinds)} kinds of faults: {', '.join(sorted(self.kinds))}"
        )


def draw_plan(
    rng: Random,
    damage: Random,
    quiet: Random,
    only: Collection[str] | None,
    given: Mapping[str, object],
) -> Plan:
    """A plan. ``only``: of these kinds of faults; ``given``: instead of what is drawn.

    Runs differ in what may go wrong at all: some troubles need that others stay away. Whether logs
    are damaged is drawn from ``damage``, and whether it is quiet from ``quiet``.
    """
    policy = rng.choice(("commit", "commit", "commit", "commit", "interval", "os"))
    kinds = set(KINDS)
    if rng.random() >= _ALWAYS:
        kinds = set(rng.sample(KINDS, rng.randint(3, len(KINDS) - 1)))
    if damage.random() < _DAMAGED:
        kinds.add(DAMAGED_LOG)
    drawn: dict[str, object] = {
        "nodes": tuple(range(1, rng.choice((3, 3, 3, 4, 5)) + 1)),
        "partitions": rng.choice((1, 2, 3)),
        "min_isr": rng.choice((1, 2, 2, 3, None)),
        "flush_policy": policy,
        "unclean": rng.random() < 1 / 6,
        "kinds": frozenset(kinds if only is None else only),
        "hands_over": rng.random() < 5 / 6,
    }
    if given.get("transactions"):
        drawn |= _for_transactions(rng, kinds if only is None else only)
    drawn |= _for_a_quiet_time(quiet, given)
    return Plan(**{**drawn, **given})  # type: ignore[arg-type]


def _for_transactions(rng: Random, kinds: Collection[str]) -> dict[str, object]:
    """What is drawn otherwise where clients write transactions."""
    of_transactions = rng.sample(TRANSACTION_KINDS, rng.randint(1, len(TRANSACTION_KINDS)))
    return {
        "partitions": rng.choice((2, 3)),
        "min_isr": rng.choice((1, 2, 2)),
        "flush_policy": "commit",
        "unclean": False,
        "hands_over": True,
        "kinds": frozenset([kind for kind in kinds if kind in SAFE_KINDS] + of_transactions),
        "left_over": rng.choice((0.02, 0.1, 0.3)),
        "timeout_ms": rng.choice((300, 1000, 3000)),
        "last_epoch": rng.choice((LAST_EPOCH, LAST_EPOCH, LAST_EPOCH, 4)),
        "too_large": rng.choice((0.0, 0.0, 0.02)),
    }


def _for_a_quiet_time(rng: Random, given: Mapping[str, object]) -> dict[str, object]:
    """How long it is quiet, and what ages in that time.

    Records do not where there are transactions: what is left of one must be all of it.
    """
    drawn_ms = rng.choice(_QUIET_MS) if rng.random() < _QUIET else 0
    quiet_ms = int(str(given.get("quiet_ms", drawn_ms)))
    ages_ms = (0, quiet_ms // 12, quiet_ms // 4)
    expiration_ms, retention_ms = rng.choice(ages_ms), rng.choice(ages_ms)
    return {
        "quiet_ms": quiet_ms,
        "producer_expiration_ms": expiration_ms and max(expiration_ms, _LEAST_EXPIRATION_MS),
        "retention_ms": 0 if given.get("transactions") else retention_ms,
    }
