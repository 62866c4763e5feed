"""The address of a broker that clients from outside are told, since metadata.version 7."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.versions import EXTERNAL_ADDRESSES_SINCE
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import Driver

OUTSIDE = ("b1.example.com", 9094)
NOWHERE = ("", 0)


def told(driver: Driver, node: int = 1) -> tuple[str, int]:
    """What brokers know of it, by the feed of changes."""
    record = driver.image.brokers[node]
    return record.external_host, record.external_port


def raise_to(driver: Driver, version: int) -> None:
    command = cluster_pb2.RaiseMetadataVersionCommand(
        metadata_version=version, controller_supports=version
    )
    driver.ok(raise_metadata_version=command)


def test_a_registration_tells_brokers_of_it() -> None:
    driver = Driver()
    driver.register(1, external=OUTSIDE)
    driver.register(2)
    assert (told(driver, 1), told(driver, 2)) == (OUTSIDE, NOWHERE)


def test_what_happens_to_the_broker_leaves_it() -> None:
    driver = Driver()
    driver.register(1, external=OUTSIDE)
    driver.unfence(1)
    driver.fence(1)
    assert told(driver) == OUTSIDE


def test_a_new_process_replaces_it() -> None:
    driver = Driver()
    driver.register(1, external=OUTSIDE)
    driver.register(1, life=2)
    assert told(driver) == NOWHERE


def test_a_snapshot_holds_it() -> None:
    driver = Driver()
    driver.register(1, external=OUTSIDE)
    other = ClusterState.restore(driver.state.snapshot())
    assert other.brokers == driver.state.brokers
    assert (other.brokers[1].external_host, other.brokers[1].external_port) == OUTSIDE
    assert other.snapshot() == driver.state.snapshot()


@pytest.mark.parametrize("external", [OUTSIDE, ("h" * 256, 9094), ("h", 0), ("", 1), ("h", 65_536)])
def test_older_controllers_and_these_make_the_same_of_the_same_entry(
    external: tuple[str, int],
) -> None:
    """Software of level 6 passes over the fields, whatever is in them."""
    with_it, without = (Driver(metadata_version=EXTERNAL_ADDRESSES_SINCE - 1) for _ in range(2))
    assert with_it.register(1, external=external) == without.register(1)
    assert told(with_it) == NOWHERE
    assert with_it.state.snapshot() == without.state.snapshot()


def test_after_the_upgrade_the_same_process_has_it_taken_and_keeps_its_epoch() -> None:
    driver = Driver(metadata_version=EXTERNAL_ADDRESSES_SINCE - 1)
    for node in (1, 2, 3):
        supports = EXTERNAL_ADDRESSES_SINCE
        driver.register(node, supports=supports, external=OUTSIDE if node == 1 else NOWHERE)
        driver.unfence(node)
    driver.create(assignments=[[1, 2, 3]])
    before, partition = driver.state.brokers[1], driver.partition()
    raise_to(driver, EXTERNAL_ADDRESSES_SINCE)
    assert told(driver) == NOWHERE, "nobody has said it since"
    again = driver.register(1, supports=EXTERNAL_ADDRESSES_SINCE, external=OUTSIDE)
    assert again == before.broker_epoch
    assert told(driver) == OUTSIDE
    assert driver.state.brokers[1] == before._replace(
        external_host=OUTSIDE[0], external_port=OUTSIDE[1]
    )
    assert driver.partition() == partition, "it leads what it led"


@pytest.mark.parametrize("external", [("h" * 256, 9094), ("h", 0), ("", 1), ("h", 65_536)])
def test_what_is_no_address_is_refused(external: tuple[str, int]) -> None:
    driver = Driver()
    result = driver.run(register_broker=driver.registration(1, external=external))
    assert result.error.code == ErrorCode.INVALID_REQUEST
    assert "set external.advertised" in result.error.message
    assert not driver.state.brokers
