"""What judges a history: the contract that every checker fulfils.

A checker is pure: it looks at nothing but what it is given, and gives the same verdict each time.
Its class docstring defines its anomaly exactly, and is what the report shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.chaos.history import History
    from penstock.chaos.verdict import Verdict


@dataclass(frozen=True, slots=True)
class HeldFault:
    """A fault as it was: nanoseconds on the history's clock, and who it struck."""

    nemesis: str
    kind: str
    began_t: int
    held_t: int
    healed_t: int
    struck: Sequence[int | str]
    """The nodes, or workers, that it was about in the end."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a node's process used at a time."""

    t: int
    node: int
    pid: int
    memory_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class ReplicaRecords:
    """A replica's log below the high watermark after healing, as digests of its batches.

    ``batches`` are (base offset, last offset, SHA-256) in order.
    """

    topic: str
    partition: int
    node: int
    log_start_offset: int
    high_watermark: int
    batches: Sequence[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run beside its history. Empty where nothing was gathered."""

    faults: Sequence[HeldFault] = ()
    samples: Sequence[Sample] = ()
    replicas: Sequence[ReplicaRecords] = ()
    logs: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By node the lines of its log that tell of a crash or a broken assertion."""
    watermarks: Sequence[Mapping[str, Any]] = ()
    """What brokers said of partitions as time went by: t, node, topic, topic_id, partition,
    leader_epoch, high_watermark, log_start_offset, is_leader."""


class Checker(Protocol):
    """``name`` is what the report and the table of known bugs know it by."""

    name: str

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge. Never raises for what a history may hold."""
        ...
