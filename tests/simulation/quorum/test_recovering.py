"""What the simulator takes for a survivor's log, when a majority is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.raft_meta.journal import COMMAND
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import VoterSet
from tests.simulation.quorum import node, recovering
from tests.simulation.quorum.checkers import Violation
from tests.simulation.quorum.world import World

VOTERS = VoterSet.of([1, 2, 3])


@pytest.fixture
def world() -> Iterator[World]:
    with node.simulated(batch_bytes=1 << 20, chunk_bytes=1 << 18):
        yield World(0)


def write_journal(world: World, number: int, last_index: int) -> None:
    journal = node._journal(
        recovering._directory(world, number) / "journal",
        cluster_id=node.CLUSTER_ID,
        node_id=number,
    )
    journal.found(VOTERS)
    for index in range(journal.last_index + 1, last_index + 1):
        journal.add(COMMAND + b"%d" % index, index, 1)
    journal.close()


def decide(world: World, last_index: int) -> None:
    for index in range(2, last_index + 1):
        world.checkers.decided[index] = (1, COMMAND + b"%d" % index)
        world.checkers.decided_in[index] = 1


def test_a_snapshot_that_a_survivors_journal_lacks_is_its_log(world):
    write_journal(world, 1, 10)
    write_journal(world, 2, 15)
    SnapshotStore(recovering._directory(world, 1)).save(Snapshot(20, 1, b"state", VOTERS))
    decide(world, 20)
    logs = {number: recovering._log(world, number) for number in (1, 2)}
    assert {number: log.last_index for number, log in logs.items()} == {1: 20, 2: 15}
    assert [recovering._surveys(world)[number].last_index for number in (1, 2)] == [20, 15]
    world.checkers.survives(1, logs[1].entries, [logs[2].entries])
    with pytest.raises(Violation, match="goes on without entry 16"):
        world.checkers.survives(2, logs[2].entries, [logs[1].entries])


def test_a_journal_that_goes_on_after_its_snapshot_is_a_survivors_log(world):
    write_journal(world, 1, 10)
    SnapshotStore(recovering._directory(world, 1)).save(Snapshot(8, 1, b"state", VOTERS))
    assert recovering._log(world, 1).last_index == 10
