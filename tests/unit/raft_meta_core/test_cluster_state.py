from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.raft_meta.core import cluster_state
from penstock.raft_meta.core.cluster_state import COMMANDS, ClusterState
from penstock.raft_meta.core.versions import METADATA_VERSION, SoftwareTooOldError
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    ErrorCode,
    StorageError,
)
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, Driver, incarnation, topic_id


def code(result: cluster_pb2.CommandResult) -> int:
    return result.error.code


def test_a_new_state_knows_nothing() -> None:
    state = ClusterState()
    state.validate()
    assert (state.applied_index, state.controller_epoch, state.controller_id) == (0, 0, -1)
    assert state.cluster_id == ""
    assert not state.brokers
    assert not state.topics


def test_the_first_controller_sets_the_cluster_id_and_tells_brokers() -> None:
    state = ClusterState()
    body = cluster_pb2.BecomeControllerCommand(controller_id=3, cluster_id="c")
    command = cluster_pb2.Command(controller_epoch=7, become_controller=body)
    applied = state.apply(1, command.SerializeToString())
    assert applied.delta is not None
    assert applied.delta.controller_epoch == 7
    assert applied.delta.controller_id == 3
    assert applied.delta.cluster_id == "c"
    assert (state.cluster_id, state.controller_epoch, state.controller_id) == ("c", 7, 3)


def test_a_controller_epoch_is_claimed_once_and_only_upwards() -> None:
    driver = Driver()
    assert code(driver.claim(1).result) == ErrorCode.STALE_CONTROLLER_EPOCH
    assert not driver.claim(5, node=2).result.HasField("error")
    assert code(driver.claim(4).result) == ErrorCode.STALE_CONTROLLER_EPOCH
    assert driver.state.controller_id == 2


@pytest.mark.parametrize("cluster_id", ["", "another"])
def test_a_controller_of_another_cluster_claims_nothing(cluster_id: str) -> None:
    driver = Driver()
    before = driver.state.controller_epoch
    assert code(driver.claim(9, cluster_id=cluster_id).result) == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert driver.state.controller_epoch == before


def command_of(epoch: int, sequence: int) -> bytes:
    body = cluster_pb2.RegisterBrokerCommand(
        node_id=1, incarnation_id=incarnation(1), cluster_id=CLUSTER, host="h", port=1
    )
    command = cluster_pb2.Command(controller_epoch=epoch, sequence=sequence, register_broker=body)
    return command.SerializeToString()


def test_commands_before_any_controller_are_stale() -> None:
    state = ClusterState()
    applied = state.apply(1, command_of(0, 1))
    assert code(applied.result) == ErrorCode.STALE_CONTROLLER_EPOCH
    assert not state.brokers


@pytest.mark.parametrize("epoch", [1, 3])
def test_only_the_epoch_in_force_commands(epoch: int) -> None:
    driver = Driver()
    driver.claim(2)
    before = driver.state.metadata().SerializeToString(deterministic=True)
    applied = driver.apply_bytes(command_of(epoch, 9))
    assert code(applied.result) == ErrorCode.STALE_CONTROLLER_EPOCH
    assert applied.delta is None
    after = driver.state.metadata()
    after.index -= 1
    assert after.SerializeToString(deterministic=True) == before


def test_a_sequence_takes_effect_once_even_if_it_was_refused() -> None:
    driver = Driver()
    refused = driver.run(delete_topic=cluster_pb2.DeleteTopicCommand(name="nothing"))
    assert code(refused) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    used = driver.sequence
    assert driver.state.last_sequence == used
    applied = driver.apply_bytes(command_of(driver.epoch, used))
    assert code(applied.result) == ErrorCode.DUPLICATE_PROPOSAL
    assert not driver.state.brokers
    assert not driver.apply_bytes(command_of(driver.epoch, used + 5)).result.HasField("error")
    assert code(driver.apply_bytes(command_of(driver.epoch, used + 4)).result) == (
        ErrorCode.DUPLICATE_PROPOSAL
    )


def test_a_new_controller_counts_anew() -> None:
    driver = Driver()
    for _ in range(5):
        driver.run(delete_topic=cluster_pb2.DeleteTopicCommand(name="nothing"))
    driver.claim(2)
    assert driver.state.last_sequence == 0
    assert not driver.apply_bytes(command_of(2, 1)).result.HasField("error")


def test_bytes_that_are_no_command_are_refused_and_use_no_sequence() -> None:
    driver = Driver()
    before = driver.state.last_sequence
    applied = driver.apply_bytes(b"\xff\xff\xff")
    assert code(applied.result) == ErrorCode.INVALID_REQUEST
    assert driver.state.last_sequence == before


def test_a_command_without_a_known_body_needs_a_newer_version() -> None:
    driver = Driver()
    assert code(driver.run()) == ErrorCode.UNSUPPORTED_METADATA_VERSION


def test_every_command_of_the_protocol_has_a_handler_and_a_version() -> None:
    bodies = {field.name for field in cluster_pb2.Command.DESCRIPTOR.oneofs[0].fields}
    assert set(COMMANDS) == bodies - {"become_controller"}
    assert all(1 <= kind.since_version <= METADATA_VERSION for kind in COMMANDS.values())


def test_a_command_newer_than_the_metadata_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    newer = replace(COMMANDS["register_broker"], since_version=METADATA_VERSION + 1)
    monkeypatch.setattr(cluster_state, "COMMANDS", {**COMMANDS, "register_broker": newer})
    applied = driver.apply_bytes(command_of(driver.epoch, driver.sequence + 1))
    assert code(applied.result) == ErrorCode.UNSUPPORTED_METADATA_VERSION
    assert not driver.state.brokers
    assert driver.state.last_sequence == driver.sequence + 1


def test_a_snapshot_of_a_newer_metadata_version_is_refused() -> None:
    whole = cluster_pb2.ClusterSnapshot.FromString(Driver().state.snapshot())
    whole.metadata_version = METADATA_VERSION + 1
    with pytest.raises(SoftwareTooOldError, match="install a newer Penstock"):
        ClusterState.restore(whole.SerializeToString())


def test_a_snapshot_without_a_metadata_version_is_damaged() -> None:
    whole = cluster_pb2.ClusterSnapshot.FromString(Driver().state.snapshot())
    whole.metadata_version = 0
    with pytest.raises(StorageError, match="damaged"):
        ClusterState.restore(whole.SerializeToString())


def first_claim(metadata_version: int) -> bytes:
    body = cluster_pb2.BecomeControllerCommand(
        controller_id=1, cluster_id=CLUSTER, metadata_version=metadata_version
    )
    return cluster_pb2.Command(controller_epoch=1, become_controller=body).SerializeToString()


@pytest.mark.parametrize(("claimed", "in_force"), [(0, 1), (1, 1), (METADATA_VERSION,) * 2])
def test_a_new_cluster_works_at_the_version_of_its_first_controller(
    claimed: int, in_force: int
) -> None:
    state = ClusterState()
    state.apply(1, first_claim(claimed))
    assert state.metadata_version == in_force
    restored = ClusterState.restore(state.snapshot())
    assert restored.metadata_version == in_force


def test_a_later_controller_does_not_change_the_version() -> None:
    driver = Driver()
    driver.claim(2, metadata_version=1)
    assert driver.state.metadata_version == METADATA_VERSION


def test_a_log_of_a_newer_metadata_version_ends_the_process() -> None:
    state = ClusterState()
    with pytest.raises(SoftwareTooOldError, match="install a newer Penstock"):
        state.apply(1, first_claim(METADATA_VERSION + 1))


def test_at_an_older_metadata_version_newer_commands_are_refused() -> None:
    driver = Driver(metadata_version=1)
    body = cluster_pb2.AlterReassignmentsCommand()
    refused = driver.run(alter_reassignments=body)
    assert code(refused) == ErrorCode.UNSUPPORTED_METADATA_VERSION
    assert "penstock cluster upgrade" in refused.error.message


def test_an_index_that_does_not_rise_is_the_engines_fault() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="is applied after"):
        driver.state.apply(driver.index, b"")


def test_gaps_between_indexes_are_the_engines_own_entries() -> None:
    driver = Driver()
    driver.index += 10
    driver.register(1)
    assert driver.state.brokers[1].broker_epoch == driver.index == driver.image.index


def test_a_snapshot_restores_everything() -> None:
    driver = Driver(brokers=3)
    driver.create(partitions=4, replication_factor=3, retention_ms="5000")
    about = driver.about(2)
    driver.ok(allocate_producer_ids=cluster_pb2.AllocateProducerIdsCommand(**about))
    driver.fence(2)
    snapshot = driver.state.snapshot()
    restored = ClusterState.restore(snapshot)
    restored.validate()
    assert restored.snapshot() == snapshot
    assert restored.applied_index == driver.index
    assert restored.topic("orders") == driver.state.topic("orders")
    assert restored.last_sequence == driver.sequence


@pytest.mark.parametrize("junk", [b"\xff", b"junk"])
def test_an_unreadable_snapshot_is_said_to_be_one(junk: bytes) -> None:
    with pytest.raises(StorageError, match="unreadable"):
        ClusterState.restore(junk)


def test_the_same_state_reached_in_another_order_has_the_same_snapshot() -> None:
    one, other = Driver(brokers=1), Driver(brokers=1)
    names = ["b", "a", "c"]
    for number in (1, 2, 3):
        one.create(names[number - 1], number=number, assignments=[[1]], retention_ms="1")
    for number in (3, 1, 2):
        other.create(names[number - 1], number=number, assignments=[[1]], retention_ms="1")
    assert list(one.state.topics) != list(other.state.topics)
    assert one.state.snapshot() == other.state.snapshot()


def test_reading_what_is_not_there() -> None:
    state = Driver().state
    assert state.topic("nothing") is None
    assert state.partition(topic_id(1), 0) is None
    assert list(state.partitions(topic_id(1))) == []
    assert state.leader_count(1) == 0
