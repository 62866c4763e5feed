"""What production makes of a disk that fails, shown by the simulated one."""

from __future__ import annotations

from random import Random

import pytest

from penstock.raft_meta.journal import NO_OP, LmdbJournal
from tests.simulation.quorum.disk import Disk, FlushError, SimulatedPath

CHANCES = 20


def opened(disk: Disk) -> LmdbJournal:
    return LmdbJournal(
        SimulatedPath(disk, "journal"),
        cluster_id="c",
        node_id=1,
        open_environment=disk.open_environment,
        new_directory_id=lambda: b"d" * 16,
    )


def promised(journal: LmdbJournal) -> tuple[int, str | None, int]:
    return journal.getCurrentTerm(), journal.getVotedForNodeId(), journal.last_index


def test_what_is_said_after_a_failed_flush_outlives_a_loss_of_power():
    """The cache may have what the failed flush was for, and no disk: nobody may build on that."""
    for chance in range(CHANCES):
        disk = Disk(Random(chance))
        fail_a_flush(disk)
        journal = opened(disk)
        said = promised(journal)
        journal.sync()  # As before everything that a voter says.
        journal.abandon()
        disk.lose_power()
        assert promised(opened(disk)) == said


def fail_a_flush(disk: Disk) -> None:
    """Vote and append, and end since that could not be made durable."""
    journal = opened(disk)
    journal.add(NO_OP, 1, 0)
    journal.sync()
    journal.add(NO_OP, 2, 3)
    journal.setCurrentTerm(3, "2")
    disk.flush_fuse = 0
    with pytest.raises(FlushError):
        journal.sync()
    journal.abandon()
