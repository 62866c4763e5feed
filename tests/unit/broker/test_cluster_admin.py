"""Shared settings and the feature level, as a broker forwards and shows them."""

from __future__ import annotations

from pathlib import Path

from penstock.broker.config import NodeConfig
from penstock.broker.live_config import LiveConfig
from penstock.v1 import admin_pb2, cluster_pb2
from penstock.wire.cluster_config import CLUSTER_CONFIGS
from penstock.wire.errors import ErrorCode, InvalidConfigError, RequestTimedOutError
from tests.unit.broker.test_services import FakeControllers, image_with, led_nowhere, servicer_of


def node(tmp_path: Path, text: str = "", **environment: str) -> NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text(
        f'node.id = 1\ndata.dir = "{tmp_path}"\ncontroller.quorum.voters = "1@h:1"\n{text}'
    )
    return NodeConfig.load(path, environment, ["log.level=warning"])


def entry(live: LiveConfig, key: str) -> admin_pb2.ConfigEntry:
    return next(entry for entry in live.describe() if entry.key == key)


def test_every_setting_says_who_set_it(tmp_path: Path) -> None:
    config = node(tmp_path, "replica.lag.time.max.ms = 9000\n", PENSTOCK_NODE_RACK="r1")
    live = LiveConfig(config)
    live.take({"leader.imbalance.enable": "false", "replica.lag.time.max.ms": "8000"})
    shown = {
        key: (entry(live, key).value, entry(live, key).source)
        for key in (
            "leader.imbalance.enable",
            "replica.lag.time.max.ms",
            "node.id",
            "node.rack",
            "log.level",
            "log.format",
        )
    }
    assert shown == {
        "leader.imbalance.enable": ("false", "cluster"),
        "replica.lag.time.max.ms": ("8000", "cluster"),
        "node.id": ("1", "node file"),
        "node.rack": ("r1", "environment"),
        "log.level": ("warning", "command line"),
        "log.format": ("console", "default"),
    }
    assert entry(live, "replica.lag.time.max.ms").dynamic
    assert not entry(live, "node.id").dynamic


def test_what_the_cluster_shares_no_more_is_the_nodes_own_again(tmp_path: Path) -> None:
    live = LiveConfig(node(tmp_path, "replica.lag.time.max.ms = 9000\n"))
    live.take({"replica.lag.time.max.ms": "8000", "log.min.free.bytes": "5"})
    assert (live.now.replica_lag_time_max_ms, live.now.log_min_free_bytes) == (8000, 5)
    live.take({"a.key.of.a.newer.version": "x"})
    assert live.now.replica_lag_time_max_ms == 9000
    assert entry(live, "replica.lag.time.max.ms").source == "node file"


def test_every_shared_setting_is_a_setting_of_a_node(tmp_path: Path) -> None:
    live = LiveConfig(node(tmp_path))
    dynamic = {entry.key: entry.value for entry in live.describe() if entry.dynamic}
    assert dynamic == {key: entry.default for key, entry in CLUSTER_CONFIGS.items()}


async def test_settings_are_shown_and_changes_forwarded() -> None:
    controllers = FakeControllers()
    servicer = servicer_of(image_with(), controllers, led_nowhere)
    shown = await servicer.DescribeNodeConfigs(admin_pb2.DescribeNodeConfigsRequest(), None)
    assert (shown.node_id, shown.entries[0].key) == (1, "node.id")
    change = cluster_pb2.AlterClusterConfigsCommand(set={"leader.imbalance.enable": "false"})
    request = admin_pb2.AlterClusterConfigsRequest(change=change)
    assert not (await servicer.AlterClusterConfigs(request, None)).HasField("error")
    assert controllers.commands[0].alter_cluster_configs == change
    controllers.result.error.CopyFrom(InvalidConfigError("made up").to_proto())
    refused = await servicer.AlterClusterConfigs(request, None)
    assert refused.error.code == ErrorCode.INVALID_CONFIG
    controllers.failure = RequestTimedOutError("nobody")
    lost = await servicer.AlterClusterConfigs(request, None)
    assert lost.error.code == ErrorCode.REQUEST_TIMED_OUT


def brokers_that_support(*versions: int) -> cluster_pb2.MetadataDelta:
    return cluster_pb2.MetadataDelta(
        index=2,
        brokers=[
            cluster_pb2.BrokerRecord(node_id=node, max_metadata_version=version)
            for node, version in enumerate(versions, start=1)
        ],
    )


async def test_without_a_level_named_it_is_the_newest_that_all_support() -> None:
    image = image_with()
    image.apply(brokers_that_support(5, 3, 4))
    controllers = FakeControllers()
    servicer = servicer_of(image, controllers, led_nowhere)
    for supported, wanted in ((9, 3), (2, 2)):
        controllers.supported = supported
        answer = await servicer.RaiseMetadataVersion(admin_pb2.RaiseMetadataVersionRequest(), None)
        assert answer.metadata_version == wanted
        command = controllers.commands.pop()
        assert command.raise_metadata_version.metadata_version == wanted


async def test_a_level_that_a_controller_does_not_know_is_not_forwarded() -> None:
    controllers = FakeControllers()
    servicer = servicer_of(image_with(), controllers, led_nowhere)
    request = admin_pb2.RaiseMetadataVersionRequest(metadata_version=3)
    answer = await servicer.RaiseMetadataVersion(request, None)
    assert answer.error.code == ErrorCode.UNSUPPORTED_METADATA_VERSION
    assert "all know 2" in answer.error.message
    assert not controllers.commands
