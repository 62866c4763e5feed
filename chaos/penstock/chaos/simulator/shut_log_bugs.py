"""Rules left out of what becomes of logs that do not open."""

from __future__ import annotations

from typing import Final

from penstock.broker.core import log_copy
from penstock.broker.core.log_copy import LogCopy
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.replica_reports import ReplicaReports
from penstock.chaos.simulator import disk
from penstock.chaos.simulator.faults import DAMAGED_LOG, Fault
from penstock.chaos.simulator.known_bug import NO_LOSS, Bug
from penstock.wire.ids import TopicIdPartition


def _whenever_another_leads(image: MetadataImage, key: TopicIdPartition, node_id: int) -> bool:
    record = image.partition_by_id(key)
    return record is not None and record.leader not in (-1, node_id)


def _as_if_it_were_read(self: LogCopy) -> None:
    self._read_at, self.end_offset = self._reading, self._offset


def _up_to_the_end_that_was_found(self: LogCopy) -> None:
    if self._offset >= self.error.end_offset:
        self.leader_ends()


def _but_for_copies(self: ReplicaReports, key: TopicIdPartition) -> bool:
    return key in self._damaged


def _never() -> bool:
    return False


def _while_it_is_alone() -> tuple[Fault, ...]:
    """The others of an in-sync set die, and the last one restarts with a log that does not open."""
    faults: list[Fault] = []
    for number, (first, second, last) in enumerate(((4, 5, 1), (5, 4, 2), (4, 5, 3))):
        at_ms = 1500 + 3500 * number
        faults += [
            Fault(at_ms, "kill", (first,), 2500),
            Fault(at_ms + 100, "kill", (second,), 2500),
            Fault(at_ms + 800, DAMAGED_LOG, (last,), 200),
        ]
    return tuple(faults)


def _while_the_leader_rots() -> tuple[Fault, ...]:
    """One replica is down, a bit flips in the second, and the third does not open."""
    faults: list[Fault] = []
    for number, (down, flipped, shut) in enumerate(((1, 2, 3), (3, 1, 2), (2, 3, 1))):
        at_ms = 1500 + 3500 * number
        faults += [
            Fault(at_ms, "kill", (down,), 2500),
            Fault(at_ms + 300, "bit flip", (flipped,)),
            Fault(at_ms + 310, DAMAGED_LOG, (shut,), 60),
        ]
    return tuple(faults)


_OF_ROT: Final = (DAMAGED_LOG, "bit flip")

SHUT_LOG_BUGS: Final[dict[str, Bug]] = {
    "shut-logs-are-dropped-in-sync": Bug(
        "a log that can't be used is dropped while its replica is still in the in-sync set",
        log_copy,
        "may_mend",
        _whenever_another_leads,
        (DAMAGED_LOG, "slow disk"),
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1},
    ),
    "leaders-are-not-read-through": Bug(
        "a log that does not open is dropped without a look at what its leader has",
        LogCopy,
        "_look_whether_read",
        _as_if_it_were_read,
        _OF_ROT,
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 1, "min_isr": 1},
        _while_the_leader_rots(),
    ),
    "copies-are-sound-at-once": Bug(
        "a replica counts as sound as soon as its log is being copied anew",
        ReplicaReports,
        "is_damaged",
        _but_for_copies,
        (DAMAGED_LOG,),
    ),
    "empty-logs-replace-shut-ones": Bug(
        "an empty log is hosted in the place of one that does not open",
        disk,
        "stays_shut",
        _never,
        (DAMAGED_LOG,),
        {**NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 1},
        _while_it_is_alone(),
    ),
    "no-more-is-read-than-was-found": Bug(
        "a leader is read up to the end that was found, below what is known to be committed",
        LogCopy,
        "_look_whether_read",
        _up_to_the_end_that_was_found,
        (DAMAGED_LOG,),
    ),
}
