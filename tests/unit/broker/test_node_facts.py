"""What a node tells of itself: its disks freshly measured, and what became of a hanging one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from penstock.broker import node_facts
from penstock.broker.config import NodeConfig
from penstock.broker.node_facts import DiskFacts, DiskProbe, NodeFacts, measure_disk
from penstock.raft_meta.core.versions import DRAINS_SINCE, METADATA_VERSION
from penstock.v1 import admin_pb2, cluster_pb2, node_pb2
from penstock.wire.errors import ErrorCode, InvalidRequestError
from tests.unit.broker.test_services import FakeControllers, image_with, led_nowhere, servicer_of


def facts_of(tmp_path: Path, registry: CollectorRegistry | None = None) -> NodeFacts:
    settings = tmp_path / "node.toml"
    settings.write_text(
        f'node.id = 3\ndata.dir = "{tmp_path}"\ncontroller.quorum.voters = "3@h:1"\n'
        'metrics.listen = "127.0.0.1:9094"\n'
    )
    config = NodeConfig.load(settings, {}, [])
    return NodeFacts(config, registry or CollectorRegistry())


async def test_a_node_describes_itself(tmp_path: Path) -> None:
    (tmp_path / "raft").mkdir()
    told = await facts_of(tmp_path).describe()
    assert (told.node_id, told.http_address) == (3, "127.0.0.1:9094")
    assert list(told.roles) == ["broker", "controller"]
    assert (told.min_metadata_version, told.max_metadata_version) == (1, METADATA_VERSION)
    assert 0 < told.started_ms <= told.clock_ms
    assert 0 < told.open_descriptors < told.max_descriptors
    assert told.resident_bytes > 10 << 20
    (directory,) = told.directories
    assert directory.path == str(tmp_path / "raft")
    assert 0 < directory.free_bytes <= directory.total_bytes
    assert directory.fsync_us >= 0
    assert directory.failure == ""


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    found = measure_disk(tmp_path)
    assert found.fsync_us >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_is_unknown(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "gone") == DiskFacts(-1, -1, -1)


async def test_a_disk_that_hangs_is_not_waited_for_nor_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), []

    def hang(path: Path) -> DiskFacts:
        asked.append(path)
        assert answers.wait(20)
        return DiskFacts(9, 8, 7)

    monkeypatch.setattr(node_facts, "measure_disk", hang)
    probe = DiskProbe(tmp_path)
    for _ in range(3):
        assert await probe.measure(0.02) == DiskFacts(-1, -1, -1)
    assert asked == [tmp_path]
    answers.set()
    assert await probe.measure(20) == DiskFacts(9, 8, 7)


async def test_metrics_are_told_as_text(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Gauge("penstock_probe", "Tried here", registry=registry).set(7)
    node = facts_of(tmp_path, registry)
    told = await asyncio.gather(node.read_metrics(), node.read_metrics())
    assert all("penstock_probe 7.0" in one.text and one.node_id == 3 for one in told)


async def test_tools_are_told_of_the_node_they_ask() -> None:
    servicer = servicer_of(image_with(), FakeControllers(), led_nowhere)
    assert (await servicer.DescribeNode(node_pb2.DescribeNodeRequest(), None)).version == "0.1"
    told = await servicer.ReadMetrics(node_pb2.ReadMetricsRequest(), None)
    assert (told.node_id, told.text) == (1, "penstock_probe 7.0\n")
    other = await servicer.DescribeNode(node_pb2.DescribeNodeRequest(controller_id=7), None)
    assert other.error.code == ErrorCode.UNKNOWN_VOTER
    asked = await servicer.ReadMetrics(node_pb2.ReadMetricsRequest(controller_id=7), None)
    assert asked.error.code == ErrorCode.UNKNOWN_VOTER


async def test_a_drain_is_forwarded_with_the_time_and_answered_with_what_is_left() -> None:
    controllers = FakeControllers()
    controllers.result.drain_broker.remaining_leaderships = 4
    image = image_with()
    servicer = servicer_of(image, controllers, led_nowhere)
    told = await servicer.DrainBroker(admin_pb2.DrainBrokerRequest(node_id=2), None)
    assert told == admin_pb2.DrainBrokerResponse(remaining_leaderships=4)
    sent = controllers.commands[0].drain_broker
    assert sent.node_id == 2
    assert sent.since_ms > 1_700_000_000_000
    await servicer.DrainBroker(admin_pb2.DrainBrokerRequest(node_id=2, undo=True), None)
    assert controllers.commands[1].drain_broker == cluster_pb2.DrainBrokerCommand(node_id=2)
    controllers.result.error.CopyFrom(InvalidRequestError("fenced").to_proto())
    image.metadata_version = DRAINS_SINCE
    refused = await servicer.DrainBroker(admin_pb2.DrainBrokerRequest(node_id=2), None)
    assert refused.error.code == ErrorCode.INVALID_REQUEST
    # Of a controller of before: it finds the command empty.
    image.metadata_version = DRAINS_SINCE - 1
    refused = await servicer.DrainBroker(admin_pb2.DrainBrokerRequest(node_id=2), None)
    assert refused.error.code == ErrorCode.UNSUPPORTED_METADATA_VERSION
    assert "penstock cluster upgrade" in refused.error.message
