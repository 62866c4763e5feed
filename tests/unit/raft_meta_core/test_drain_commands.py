"""A drained broker leads nothing that another in sync can lead, until it registers anew."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    ErrorCode,
    InvalidRequestError,
    UnsupportedMetadataVersionError,
)
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id


class Drains(Driver):
    def drain(self, node: int, since_ms: int = 1_000) -> int:
        body = cluster_pb2.DrainBrokerCommand(node_id=node, since_ms=since_ms)
        return self.ok(drain_broker=body).drain_broker.remaining_leaderships

    def undo(self, node: int) -> int:
        return self.drain(node, since_ms=0)

    def leaders(self, topic: int = 1) -> list[int]:
        return [partition.leader for partition in self.state.partitions(topic_id(topic))]

    def prefer(self, *numbers: int) -> list[int]:
        """The errors of an election of the preferred leaders."""
        command = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_PREFERRED)
        for number in numbers:
            command.partitions.add(topic_id=topic_id(1), partition=number)
        answers = self.ok(elect_leaders=command).elect_leaders.partitions
        return [answer.error.code for answer in answers]


def three() -> Drains:
    driver = Drains(brokers=3)
    driver.create(assignments=[[1, 2, 3], [1, 3, 2], [2, 1, 3], [3, 1, 2]])
    return driver


def test_its_leaderships_go_to_the_next_in_sync_and_it_stays_in_sync() -> None:
    driver = three()
    before = driver.partition()
    assert driver.drain(1) == 0
    assert driver.leaders() == [2, 3, 2, 3]
    now = driver.partition()
    assert now.isr == (1, 2, 3)
    assert now.leader_epoch == before.leader_epoch + 1
    assert now.partition_epoch == before.partition_epoch + 1
    assert driver.state.brokers[1].drained_since_ms == 1_000
    assert driver.image.brokers[1].drained_since_ms == 1_000


def test_what_nobody_else_in_sync_can_lead_stays_until_another_comes_in_sync() -> None:
    driver = three()
    driver.alter([1])
    assert driver.drain(1) == 1
    assert driver.leaders() == [1, 3, 2, 3]
    result = driver.alter([1, 3])
    (answer,) = result.alter_partition.partitions
    assert answer.error.code == ErrorCode.NEW_LEADER_ELECTED
    assert "is drained" in answer.error.message
    assert answer.partition.leader == 3
    assert driver.partition().isr == (1, 3)


def test_a_drained_broker_is_chosen_only_for_want_of_another() -> None:
    driver = three()
    driver.drain(2)
    driver.fence(1)
    assert driver.leaders() == [3, 3, 3, 3], "2 is the next of some, and is passed over"
    driver.fence(3)
    assert driver.leaders() == [2, 2, 2, 2], "better it than nobody"


def test_where_all_are_drained_nothing_moves_in_vain() -> None:
    driver = three()
    driver.drain(2)
    driver.drain(3)
    epochs = [part.leader_epoch for part in driver.state.partitions(topic_id(1))]
    led = sum(leader == 1 for leader in driver.leaders())
    assert led == 4
    assert driver.drain(1) == 4
    assert [part.leader_epoch for part in driver.state.partitions(topic_id(1))] == epochs


def test_who_was_drained_first_is_so_by_the_log_and_not_by_clocks() -> None:
    driver = three()
    driver.drain(3, since_ms=5_000)
    driver.drain(1, since_ms=5_000)
    driver.drain(2, since_ms=20)
    since = {node: broker.drained_since_ms for node, broker in driver.state.brokers.items()}
    assert since == {3: 5_000, 1: 5_001, 2: 5_002}
    driver.drain(3, since_ms=9_000)
    assert driver.state.brokers[3].drained_since_ms == 5_000, "it keeps its place"


def test_the_preferred_leader_is_not_elected_while_it_is_drained() -> None:
    driver = three()
    driver.drain(1)
    assert driver.prefer(0, 1) == [ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE] * 2
    driver.undo(1)
    assert driver.leaders() == [2, 3, 2, 3], "what it prefers comes back by the next round"
    assert driver.prefer(0, 1) == [0, 0]
    assert driver.leaders() == [1, 1, 2, 3]


def test_undo_relieves_drained_leaders_at_once() -> None:
    driver = three()
    for node in (1, 2, 3):
        driver.drain(node)
    led = driver.leaders()
    driver.undo(1)
    assert driver.leaders() == [1, 1, 1, 1]
    assert led != driver.leaders()


def test_new_topics_are_led_by_others() -> None:
    driver = three()
    driver.drain(1)
    driver.create("clicks", [[1, 2, 3]], number=2)
    assert driver.partition(topic=2).leader == 2
    assert driver.partition(topic=2).isr == (1, 2, 3)


def test_a_new_registration_ends_it() -> None:
    driver = three()
    driver.drain(1)
    driver.fence(1)
    assert driver.state.brokers[1].drained_since_ms, "the same process is drained still"
    driver.start(1, life=2, previous=driver.state.brokers[1].broker_epoch)
    assert driver.state.brokers[1].drained_since_ms == 0
    driver.alter([1, 2, 3])
    assert driver.prefer(0) == [0]


def test_the_same_again_changes_nothing_and_keeps_the_first_time() -> None:
    driver = three()
    driver.drain(1)
    before = driver.state.metadata()
    assert driver.drain(1, since_ms=9_999) == 0
    assert driver.undo(2) == 2
    after = driver.state.metadata()
    after.index = before.index
    assert after == before


def test_a_snapshot_keeps_it() -> None:
    driver = three()
    driver.drain(1)
    restored = ClusterState.restore(driver.state.snapshot())
    assert restored.brokers[1].drained_since_ms == 1_000
    assert restored.snapshot() == driver.state.snapshot()


def test_brokers_that_cannot_be_drained_are_refused() -> None:
    driver = three()
    with pytest.raises(BrokerIdNotRegisteredError):
        driver.drain(9)
    with pytest.raises(InvalidRequestError, match="-5"):
        driver.drain(1, since_ms=-5)
    driver.fence(1)
    with pytest.raises(InvalidRequestError, match=r"fenced.*next: "):
        driver.drain(1)
    driver.shut_down(2)
    with pytest.raises(InvalidRequestError, match="shutting down"):
        driver.drain(2)
    assert driver.undo(1) == 0, "taking the mark away is always allowed"


def test_a_cluster_of_an_older_level_refuses_it() -> None:
    driver = Drains(brokers=3, metadata_version=5)
    driver.create(assignments=[[1, 2, 3]])
    with pytest.raises(UnsupportedMetadataVersionError, match="penstock cluster upgrade"):
        driver.drain(1)
    assert driver.leaders() == [1]
