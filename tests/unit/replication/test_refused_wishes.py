"""A wish that a leader has given up never takes effect, however late a sending of it arrives.

The controllers' own state machine answers; the test says when a message that was given up comes.
"""

from __future__ import annotations

from penstock.broker.core.partition_events import IsrProposal
from penstock.broker.core.partition_leader import REFUSAL_PAUSE_MS
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.wire.errors import ErrorCode
from tests.unit.replication.late_leader import LateLeader


def wishing(metadata_version: int = METADATA_VERSION) -> tuple[LateLeader, IsrProposal]:
    """Broker 3 is back after it was fenced, has all that there is, and is wished for."""
    world = LateLeader([1, 2, 3], metadata_version=metadata_version, min_insync_replicas="1")
    world.append(5)
    for node_id in (2, 3):
        world.position(node_id, 0)
        world.ack(node_id, 5)
    assert world.replica.high_watermark == 5
    world.controllers.fence(3)
    world.controllers.unfence(3)
    world.hear_metadata()
    wish = world.replica.pending
    assert wish is not None
    assert wish.isr == {1, 2, 3}
    return world, wish


def test_a_late_sending_of_a_refused_wish_lets_nobody_in() -> None:
    world, wish = wishing()
    world.controllers.fence(3)
    assert world.answer() is ErrorCode.INELIGIBLE_REPLICA
    world.append(5)
    world.ack(2, 10)
    assert world.replica.high_watermark == 10, "nobody waits for who is fenced"
    world.controllers.unfence(3)
    error, _ = world.send(wish)
    assert error is ErrorCode.INVALID_UPDATE_VERSION
    assert world.partition().isr == (1, 2), "broker 3 lacks what was acknowledged"


def test_nor_does_one_whose_refusal_was_lost() -> None:
    world, wish = wishing()
    world.controllers.fence(3)
    world.send(wish)
    world.controllers.unfence(3)
    world.hear_metadata()
    again = world.replica.pending
    assert again is not None
    assert again.partition_epoch > wish.partition_epoch
    assert world.send(wish)[0] is ErrorCode.INVALID_UPDATE_VERSION
    assert world.answer() is None
    assert world.replica.isr == {1, 2, 3}


def test_a_refused_leader_rests_before_it_wishes_for_the_same_again() -> None:
    """What it knows of the fencing comes with the metadata, and until then it knows no better."""
    world, wish = wishing()
    world.controllers.fence(3)
    assert world.answer() is ErrorCode.INELIGIBLE_REPLICA
    assert world.replica.pending is None
    world.ack(3, 5)
    assert world.replica.pending is None
    assert world.replica.next_deadline_ms() == REFUSAL_PAUSE_MS
    world.tick(REFUSAL_PAUSE_MS)
    again = world.replica.pending
    assert again is not None
    assert again.members == wish.members
    assert again.partition_epoch == wish.partition_epoch + 1


def test_metadata_of_the_refusal_that_come_first_settle_the_wish() -> None:
    world, wish = wishing()
    world.controllers.fence(3)
    world.send(wish)
    world.hear_metadata()
    assert world.replica.pending is None
    assert world.replica.maximal_isr == {1, 2}


def test_before_metadata_version_4_a_refusal_leaves_the_partition_as_it_was() -> None:
    """Controllers of older software apply the same entries, and must come to the same state."""
    world, wish = wishing(metadata_version=3)
    world.controllers.fence(3)
    before = world.partition()
    assert world.answer() is ErrorCode.INELIGIBLE_REPLICA
    assert world.partition() == before
    assert world.replica.pending is None
    assert world.replica.next_deadline_ms() == REFUSAL_PAUSE_MS
    world.controllers.unfence(3)
    assert world.send(wish)[0] is None, "the gap that metadata.version 4 closes"
