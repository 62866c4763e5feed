"""A registration takes effect only after the one that it follows on."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import Driver


def with_an_eligible_replica(metadata_version: int = 5) -> tuple[Driver, int]:
    """Broker 2 is down and eligible; its broker epoch."""
    driver = Driver(metadata_version=metadata_version)
    for node in (1, 2, 3):
        driver.start(node)
    driver.create(assignments=[[1, 2, 3]])
    driver.fence(3)
    driver.fence(2)
    assert driver.partition().elr == (2,)
    return driver, driver.state.brokers[2].broker_epoch


def code_of(driver: Driver, request: cluster_pb2.RegisterBrokerCommand) -> int:
    result = driver.run(register_broker=request)
    return result.error.code if result.HasField("error") else 0


def test_a_late_request_of_an_earlier_process_does_not_set_the_live_one_back() -> None:
    driver, first = with_an_eligible_replica()
    late = driver.registration(2, life=2, previous=first, follows=first)
    live = driver.register(2, life=3, previous=first, follows=first)
    driver.unfence(2)
    before = driver.partition()
    result = driver.run(register_broker=late)
    assert result.error.code == ErrorCode.INVALID_UPDATE_VERSION
    assert f"after broker epoch {first}, and the newest is {live}" in result.error.message
    assert driver.state.brokers[2].broker_epoch == live
    assert driver.partition() == before


def test_a_request_that_knew_of_no_registration_follows_on_none() -> None:
    driver = Driver()
    first = driver.register(7, life=1, follows=0)
    late = driver.registration(7, life=2, follows=0)
    assert code_of(driver, late) == ErrorCode.INVALID_UPDATE_VERSION
    driver.ok(unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=7))
    follower = driver.registration(7, life=3, follows=first)
    assert code_of(driver, follower) == ErrorCode.INVALID_UPDATE_VERSION
    assert driver.register(7, life=3, follows=0) > first


def test_a_repeated_request_is_answered_as_the_first_time() -> None:
    driver, first = with_an_eligible_replica()
    request = driver.registration(2, life=2, previous=first, follows=first)
    epoch = driver.ok(register_broker=request).register_broker.broker_epoch
    assert driver.ok(register_broker=request).register_broker.broker_epoch == epoch


@pytest.mark.parametrize(("metadata_version", "follows"), [(4, 1), (5, None)])
def test_nothing_is_compared_before_level_5_nor_of_older_software(
    metadata_version: int, follows: int | None
) -> None:
    driver, first = with_an_eligible_replica(metadata_version)
    driver.register(2, life=2, previous=first)
    request = driver.registration(2, life=3, previous=first, follows=follows)
    assert code_of(driver, request) == 0


def test_who_was_never_let_in_acknowledged_nothing() -> None:
    """So the process that comes after it has all if it has what was there before."""
    driver, first = with_an_eligible_replica()
    follows = first
    for life in (2, 3, 4):
        follows = driver.register(2, life=life, previous=first, follows=follows)
        assert driver.partition().elr == (2,)
        driver.state = ClusterState.restore(driver.state.snapshot())
    driver.unfence(2)
    driver.fence(2)
    driver.register(2, life=5, previous=first, follows=follows)
    assert driver.partition().elr == (), "what it acknowledged once it was let in may be gone"


def test_who_was_never_let_in_and_shut_down_cleanly_is_followed_as_well() -> None:
    driver, first = with_an_eligible_replica()
    second = driver.register(2, life=2, previous=first, follows=first)
    third = driver.register(2, life=3, previous=second, follows=second)
    assert driver.partition().elr == (2,)
    driver.register(2, life=4, previous=first, follows=third)
    assert driver.partition().elr == (2,)


def test_after_a_process_that_lacked_something_only_its_own_epoch_counts() -> None:
    driver, first = with_an_eligible_replica()
    second = driver.register(2, life=2, previous=-1, follows=first)
    assert driver.state.brokers[2].whole_since_epoch == 0
    driver.register(2, life=3, previous=first, follows=second)
    assert driver.state.brokers[2].whole_since_epoch == 0
    assert driver.partition().elr == ()


def test_before_level_5_nothing_but_the_last_registration_counts() -> None:
    driver, first = with_an_eligible_replica(metadata_version=4)
    driver.register(2, life=2, previous=first)
    assert driver.state.brokers[2].whole_since_epoch == 0
    driver.register(2, life=3, previous=first)
    assert driver.partition().elr == ()
