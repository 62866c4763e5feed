"""Rules left out of the model of the disk, and of what a start says of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.broker.core.last_run import FoundDirectory, epoch_to_report
from penstock.chaos.simulator import contents, disk, memory_log, runs
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.known_bug import NO_LOSS, Bug


def _everything_is_sound(_: object) -> bool:
    return True


def _failures_are_not_heeded() -> bool:
    return False


def _only_of_clean_stops(found: Collection[FoundDirectory]) -> int:
    return epoch_to_report([directory._replace(durable=None) for directory in found])


def _marked_whatever_the_policy(self: runs.Runs, broker_epoch: int, *, failed: bool) -> None:
    self._durable = self._mark(broker_epoch)
    self.heard_epoch, self.was_doubted = broker_epoch, failed


def _as_if_nothing_were_lost(_: runs.Runs) -> None:
    return None


def _alone_after_it_lost_records() -> tuple[Fault, ...]:
    """Leaders lose records, and restart when those that have them have died."""
    faults: list[Fault] = []
    for at_ms in (1500, 5000, 8500):
        faults += [
            *(Fault(at_ms + 2 * count, "lost tail") for count in range(4)),
            Fault(at_ms + 60, "kill", (4,), 2500),
            Fault(at_ms + 60, "kill", (5,), 2500),
        ]
    return tuple(faults)


def _emptied_while_the_last_one_restarts() -> tuple[Fault, ...]:
    """All but one replica go, the second with its disk; then the last one restarts at once."""
    faults: list[Fault] = []
    for number, (first, second, last) in enumerate(((4, 5, 1), (5, 4, 2), (4, 5, 3))):
        at_ms = 1500 + 3500 * number
        faults += [
            Fault(at_ms, "kill", (first,), 2500),
            Fault(at_ms + 300, "lost disk", (second,), 2500),
            Fault(at_ms + 600, "power loss", (last,), 60),
        ]
    return tuple(faults)


DISK_BUGS: Final[dict[str, Bug]] = {
    "unsound-tail-is-kept": Bug(
        "a log is opened without a look at the checksums of its tail",
        contents,
        "is_sound",
        _everything_is_sound,
        ("power loss", "power loss everywhere", "kill leader", "slow disk"),
    ),
    "flipped-bits-are-served": Bug(
        "what is read is not compared with its checksum",
        memory_log,
        "is_served",
        _everything_is_sound,
        ("bit flip", "kill", "slow network"),
    ),
    "failed-flush-is-taken-for-done": Bug(
        "a flush that failed is tried again, and goes well: what it was for is gone",
        disk,
        "is_failure_heeded",
        _failures_are_not_heeded,
        ("failed flush", "power loss", "power loss everywhere"),
    ),
    "crashes-without-loss-are-unclean": Bug(
        "a crash that cost nothing counts as one that may have, under flush.policy=commit as well",
        runs,
        "epoch_to_report",
        _only_of_clean_stops,
        ("kill", "lost disk", "power loss"),
        {**NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 2},
        _emptied_while_the_last_one_restarts(),
    ),
    "lost-records-are-not-doubted": Bug(
        "who led without all that it had written starts again as one that lost nothing",
        runs.Runs,
        "records_lost",
        _as_if_nothing_were_lost,
        (),
        {**NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 3},
        _alone_after_it_lost_records(),
    ),
    "any-run-counts-as-durable": Bug(
        "a run under flush.policy os counts as one that acknowledged only what was on the disk",
        runs.Runs,
        "registered",
        _marked_whatever_the_policy,
        ("power loss", "kill", "kill leader", "slow network"),
        {"flush_policy": "os", "unclean": False},
    ),
}
