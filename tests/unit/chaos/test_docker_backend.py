from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.backends.containers import ContainerState
from penstock.chaos.backends.owner import is_gone, this_owner
from penstock.chaos.cluster import (
    CLIENTS,
    OFFERED,
    Capability,
    DiskFault,
    Link,
    LinkFault,
    PacketFault,
)
from penstock.chaos.errors import ClusterError, FaultError, PlanError
from penstock.cli.chaos import docker_backend
from penstock.cli.chaos.docker_backend import DockerBackend
from tests.unit.chaos.fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    # That nodes serve is for tests with real ones.
    monkeypatch.setattr(docker_backend, "describe_unwhole", lambda _nodes, _cluster_id: "")
    return FakeEngine()


@pytest.fixture
def backend(engine: FakeEngine, tmp_path: Path) -> DockerBackend:
    made = DockerBackend(tmp_path / "cluster", 3, engine, seed=7)
    made.start()
    engine.done.clear()
    return made


def test_each_node_is_in_the_network_of_its_wire(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    node, wire = engine.spec("node-2"), engine.spec("wire-2")
    assert node.inside == wire.name
    assert (wire.address, wire.user) == ("172.20.0.11", "0:0")
    assert set(wire.capabilities) == {"NET_ADMIN", "NET_RAW"}
    assert not node.capabilities
    assert node.read_only
    assert not node.user.startswith("0:")
    assert backend.bootstrap == "172.20.0.10:9092,172.20.0.11:9092,172.20.0.12:9092"
    settings = tomllib.loads((backend.data_directory(2).with_name("node-2.toml")).read_text())
    assert settings["node"]["id"] == 2
    assert settings["broker"]["advertised"] == "172.20.0.11:9092"
    assert settings["controller"]["quorum"]["voters"] == (
        "1@172.20.0.10:10092,2@172.20.0.11:10092,3@172.20.0.12:10092"
    )
    assert (backend.data_directory(2) / "meta.json").exists()
    assert node.mounts[str(backend.data_directory(2))] == ("/var/lib/penstock/data", True)


def test_without_broken_networks_nodes_are_in_the_run_s_own(
    engine: FakeEngine, tmp_path: Path
) -> None:
    backend = DockerBackend(tmp_path / "cluster", 1, engine, breaks_network=False)
    backend.start()
    assert list(engine.specs) == [engine.spec("node-1").name]
    assert engine.spec("node-1").address == "172.20.0.10"
    assert not {Capability.LINKS, Capability.PACKETS} & backend.capabilities
    with pytest.raises(FaultError, match="started without"):
        backend.set_packets(1, PacketFault(loss=1))
    # A cluster of one has no three replicas of anything.
    settings = tomllib.loads((backend.data_directory(1).with_name("node-1.toml")).read_text())
    assert settings["offsets"]["topic"]["replication"]["factor"] == 1


def test_what_cannot_be_broken_here_is_no_capability(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.probe_says = "the kernel gives no queue of packets"
    backend = DockerBackend(tmp_path / "cluster", 3, engine)
    assert backend.capabilities == {Capability.PROCESSES, Capability.PAUSES, Capability.FILES}
    assert engine.specs == {}  # The probe is gone.
    with pytest.raises(FaultError, match="gives no queue"):
        backend.set_links({Link(1, 2): LinkFault(cut=True)})


def test_an_image_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no image 'penstock:latest'; next: "):
        DockerBackend(tmp_path / "cluster", 3, FakeEngine(images=()))
    assert not (tmp_path / "cluster").exists()


def test_nodes_are_killed_stopped_paused_and_started(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    backend.kill(1)
    assert backend.running == [2, 3]
    backend.kill(1)  # It is gone already.
    backend.start_node(1)
    backend.start_node(1)  # It runs.
    backend.pause(2)
    backend.pause(2)
    backend.terminate(2)  # It must go on, to hear that it shall stop.
    backend.resume(3)  # It was not paused.
    assert engine.done == [
        *("SIGKILL node-1", "start node-1", "pause node-2", "unpause node-2", "SIGTERM node-2")
    ]


def test_who_does_not_stop_is_killed_and_its_log_says_so(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.deaf.add(engine.spec("node-3").name)
    backend.terminate(3)
    assert engine.done == ["SIGTERM node-3", "SIGKILL node-3"]
    backend.stop()
    assert "node 3 did not stop within 30 s and was killed" in log_of(backend, 3)


def log_of(backend: DockerBackend, node: int) -> str:
    path = backend.log(node)
    assert path is not None
    return path.read_text()


def test_who_ended_by_itself_has_a_line_of_it_in_its_log(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.end("node-1", ContainerState("exited", 0, 137, out_of_memory=True))
    backend.kill(2)
    with pytest.raises(ClusterError, match="node 1 is down"):
        backend.wait_ready(1)
    backend.start_node(1)
    backend.stop()
    assert log_of(backend, 1).splitlines() == [
        "node-1 says",
        "penstock.chaos: node 1 ended by itself: exit status 137, out of memory",
    ]
    assert "by itself" not in log_of(backend, 2)


def test_nothing_is_left_after_a_stop_and_logs_are_kept(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    backend.pause(3)
    backend.stop()
    assert (engine.specs, engine.networks, engine.closed) == ({}, {}, True)
    assert "unpause node-3" in engine.done
    assert log_of(backend, 3) == "node-3 says\n"
    backend.stop()
    assert log_of(backend, 3) == "node-3 says\n"


def test_nothing_is_left_where_stopping_fails(backend: DockerBackend, engine: FakeEngine) -> None:
    def refuse(container: str, name: str) -> None:
        raise FaultError("the engine is tired")

    engine.signal = refuse  # type: ignore[method-assign]  # It is a fake's.
    with pytest.raises(ClusterError, match="tired"):
        backend.stop()
    assert (engine.specs, engine.networks, engine.closed) == ({}, {}, True)


def test_what_dead_runs_left_is_removed_and_nothing_else(
    engine: FakeEngine, tmp_path: Path
) -> None:
    boot, pid, began = this_owner().split(":")
    assert int(pid) == os.getpid()
    live, dead = this_owner(), f"{boot}:{pid}:{int(began) + 1}"
    elsewhere = f"{boot}0:{pid}:1"  # In a container of this machine, or on another one.
    engine.others = {"live": live, "dead": dead, "elsewhere": elsewhere, "unknown": ""}
    DockerBackend(tmp_path / "cluster", 1, engine).start()
    assert engine.others == {"live": live, "elsewhere": elsewhere, "unknown": ""}
    assert [is_gone(one) for one in (live, dead, elsewhere, "")] == [False, True, False, False]


def told(engine: FakeEngine) -> dict[str, Any]:
    """What each wire was told last, since this was asked for the last time."""
    found = dict(engine.told)
    engine.told.clear()
    return found


def test_only_nodes_of_which_something_changes_are_told(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    backend.set_links({Link(1, 2): LinkFault(cut=True), Link(CLIENTS, 2): LinkFault(latency_ms=5)})
    said = told(engine)
    assert set(said) == {"wire-1", "wire-2"}
    assert [(one["direction"], one["peer"], one["cut"]) for one in said["wire-1"]["wires"]] == [
        ("out", "172.20.0.11", True)
    ]
    assert [(one["direction"], one["peer"]) for one in said["wire-2"]["wires"]] == [("in", CLIENTS)]
    backend.set_packets(3, PacketFault(loss=10))
    assert {name: one["packets"]["loss"] for name, one in told(engine).items()} == {"wire-3": 10}
    backend.heal_all()
    said = told(engine)
    assert set(said) == {"wire-1", "wire-2", "wire-3"}
    assert all(not one["wires"] and one["packets"] is None for one in said.values())
    backend.heal_all()
    assert told(engine) == {}


def test_faults_that_it_has_not_are_refused(backend: DockerBackend) -> None:
    for refused in (
        lambda: backend.set_links({Link(1, 2): LinkFault(hold=("Produce",), hold_ms=5)}),
        lambda: backend.set_links({Link(1, 9): LinkFault(cut=True)}),
        lambda: backend.set_disk(1, DiskFault("ENOSPC")),
        lambda: backend.set_clock(1, 5),
        lambda: backend.set_limits(1, descriptors=5),
    ):
        with pytest.raises(FaultError):
            refused()
    backend.set_disk(1, None)
    backend.set_clock(1, 0)
    backend.set_limits(1)
    assert backend.capabilities == OFFERED["docker"]


def test_a_network_that_does_not_answer_is_an_error(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.deaf.add(engine.spec("wire-1").name)
    with pytest.raises(FaultError, match="network of node 1 could not be changed: no such file"):
        backend.set_packets(1, PacketFault(loss=10))


def test_a_process_of_another_kernel_is_not_measured(backend: DockerBackend) -> None:
    # 4711, if it is there, is in no control group of such a container.
    assert backend.pid(1) is None


def test_versions_are_the_engine_s_and_the_image_s(backend: DockerBackend) -> None:
    assert backend.versions == {"docker": "1.2.3", "image": "penstock:latest 9.9 sha256:1"}
