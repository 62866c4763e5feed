"""What holds for the whole cluster: shared settings, the feature level, deleted topics."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core import tables
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.versions import METADATA_VERSION, SoftwareTooOldError
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    InvalidConfigError,
    InvalidRequestError,
    UnsupportedMetadataVersionError,
)
from penstock.wire.ids import TopicId
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id

LAG = "replica.lag.time.max.ms"


def configure(driver: Driver, *remove: str, validate_only: bool = False, **set_: str) -> None:
    body = cluster_pb2.AlterClusterConfigsCommand(
        set={key.replace("_", "."): text for key, text in set_.items()},
        remove=remove,
        validate_only=validate_only,
    )
    driver.ok(alter_cluster_configs=body)


def raise_to(driver: Driver, version: int, supports: int = METADATA_VERSION) -> None:
    body = cluster_pb2.RaiseMetadataVersionCommand(
        metadata_version=version, controller_supports=supports
    )
    driver.ok(raise_metadata_version=body)


def test_shared_settings_are_set_told_and_reset() -> None:
    driver = Driver()
    configure(driver, replica_lag_time_max_ms="5000", leader_imbalance_enable="false")
    assert driver.state.cluster_configs == {LAG: "5000", "leader.imbalance.enable": "false"}
    assert driver.image.cluster_configs == driver.state.cluster_configs
    index = driver.image.index
    configure(driver, replica_lag_time_max_ms="5000")
    assert driver.image.index == index, "nothing changed, and nobody is told"
    configure(driver, LAG, "leader.imbalance.enable")
    assert driver.state.cluster_configs == driver.image.cluster_configs == {}


def test_a_check_only_changes_nothing() -> None:
    driver = Driver()
    configure(driver, replica_lag_time_max_ms="5000", validate_only=True)
    assert driver.state.cluster_configs == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replica.lag.time.max.ms": "soon"}, "whole number"),
        ({"replica.lag.time.max.ms": "1"}, "from 100"),
        ({"replica.lag.max.ms": "1"}, "did you mean 'replica.lag.time.max.ms'"),
        ({"node.id": "1"}, "each node's own file"),
        ({"leader.imbalance.enable": "yes", LAG: "500"}, "true or false"),
    ],
)
def test_bad_settings_are_refused_as_a_whole(changes: dict[str, str], said: str) -> None:
    driver = Driver()
    with pytest.raises(InvalidConfigError, match=said):
        driver.ok(alter_cluster_configs=cluster_pb2.AlterClusterConfigsCommand(set=changes))
    assert driver.state.cluster_configs == {}


def test_what_cannot_be_reset_is_refused() -> None:
    driver = Driver()
    with pytest.raises(InvalidConfigError, match="did you mean"):
        configure(driver, "replica.lag.time.ms")
    with pytest.raises(InvalidConfigError, match="both set and removed"):
        configure(driver, LAG, replica_lag_time_max_ms="500")


def test_the_version_rises_once_every_broker_supports_it() -> None:
    driver = Driver(metadata_version=1)
    driver.register(1, supports=METADATA_VERSION)
    driver.register(2, supports=1)
    with pytest.raises(UnsupportedMetadataVersionError, match=r"by broker\(s\) 2: install"):
        raise_to(driver, METADATA_VERSION)
    assert driver.state.metadata_version == driver.image.metadata_version == 1
    driver.register(2, life=2, supports=METADATA_VERSION)
    raise_to(driver, METADATA_VERSION)
    assert driver.state.metadata_version == driver.image.metadata_version == METADATA_VERSION
    raise_to(driver, METADATA_VERSION)
    restored = ClusterState.restore(driver.state.snapshot())
    assert restored.metadata_version == METADATA_VERSION


def test_the_version_does_not_go_back_nor_beyond_the_controllers() -> None:
    driver = Driver()
    with pytest.raises(InvalidRequestError, match="cannot go back"):
        raise_to(driver, METADATA_VERSION - 1)
    with pytest.raises(UnsupportedMetadataVersionError, match="active controller knows"):
        raise_to(driver, METADATA_VERSION + 1)


def test_a_controller_too_old_for_the_version_ends_before_it_applies_it() -> None:
    driver = Driver()
    before = driver.state.metadata()
    with pytest.raises(SoftwareTooOldError, match="install a newer Penstock"):
        raise_to(driver, METADATA_VERSION + 1, supports=METADATA_VERSION + 1)
    after = driver.state.metadata()
    after.index = before.index
    assert after == before


def test_deleted_topics_are_remembered_for_brokers_that_were_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "MAX_DELETED_TOPICS", 2)
    driver = Driver(brokers=1)
    for number in (1, 2, 3):
        driver.create("orders", [[1]], number=number)
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="orders"))
    snapshot = driver.state.metadata()
    assert list(snapshot.deleted_topics) == [topic_id(2), topic_id(3)]
    assert ClusterState.restore(driver.state.snapshot()).snapshot() == driver.state.snapshot()
    snapshot.index += 1
    assert driver.image.apply(snapshot) is not None
    assert driver.image.was_deleted(TopicId(topic_id(3)))
    assert not driver.image.was_deleted(TopicId(topic_id(1)))


def test_an_older_version_remembers_no_deleted_topics() -> None:
    driver = Driver(brokers=1, metadata_version=1)
    driver.create(assignments=[[1]])
    driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="orders"))
    assert not driver.state.metadata().deleted_topics


def test_snapshots_of_the_first_release_are_read() -> None:
    driver = Driver(brokers=2, metadata_version=1)
    driver.create(assignments=[[1, 2]])
    old = cluster_pb2.ClusterSnapshot.FromString(driver.state.snapshot())
    old.metadata.ClearField("metadata_version")
    old.metadata.ClearField("cluster_configs")
    for broker in old.metadata.brokers:
        broker.ClearField("min_metadata_version")
        broker.ClearField("max_metadata_version")
    restored = ClusterState.restore(old.SerializeToString())
    assert restored.snapshot() == driver.state.snapshot()
    restored.validate()
