"""What the chaos harness's checkers say of a simulated run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.chaos.checkers import Checker, Evidence, HeldFault
from penstock.chaos.checkers.cycles import CircularRead
from penstock.chaos.checkers.exactly_once import ProcessedOnce, TransferTotal
from penstock.chaos.checkers.groups import GroupExclusive, ZombieCommit
from penstock.chaos.checkers.lost import AcksLevels
from penstock.chaos.checkers.registry import Settings, appends, judge, transactional
from penstock.chaos.checkers.transactions import TransactionOffsets
from penstock.chaos.simulator.recording import Recording
from penstock.chaos.verdict import Verdict
from penstock.wire.ids import TopicIdPartition

_EVIDENCE: Final = Evidence(faults=[HeldFault("simulator", "network", 0, 0, 1, ())])
"""Requests are late and lost in every run: leaders alone promise nothing."""


def judge_recording(
    recording: Recording,
    *,
    without: Collection[TopicIdPartition],
    expiring: Collection[TopicIdPartition],
    transactions: bool,
) -> list[Verdict]:
    """The verdicts of all checkers that the clients of the run are about.

    ``without`` these partitions, of which what was acknowledged may be lost or doubled by what a
    run allows; of those ``expiring`` records were deleted from the beginning on.
    """
    settings = Settings(expiring=frozenset(recording.topic_of(key) for key in expiring))
    checkers: list[Checker] = appends(settings)
    if transactions:
        checkers += [
            *transactional(),
            TransactionOffsets(),
            CircularRead(),
            ProcessedOnce(),
            GroupExclusive(),
            ZombieCommit(),
            TransferTotal(),
        ]
    else:
        checkers.append(AcksLevels())
    return judge(checkers, recording.history(without), _EVIDENCE)
