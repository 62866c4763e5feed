"""Nodes in containers: what each fault does, and whole runs with a verdict."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from penstock.chaos.backends.containers import OWNER_LABEL, DockerEngine
from penstock.chaos.cluster import CLIENTS, Capability, Link, LinkFault, PacketFault
from penstock.chaos.errors import PlanError
from penstock.cli.chaos.docker_backend import DockerBackend
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from tests.integration.chaos.commands import chaos, finish, start, write_schedule
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]
CUT = LinkFault(cut=True)
SLOW_S = 120


@pytest.fixture(scope="module")
def backend(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerBackend]:
    directory = tmp_path_factory.mktemp("docker")
    made = DockerBackend(directory / "cluster", 3, DockerEngine(), image=image)
    if Capability.LINKS not in made.capabilities:
        made.stop()
        pytest.skip("the kernel lets no network be broken here")
    try:
        made.start()
        yield made
    finally:
        made.stop()


def asked(address: str) -> metadata_pb2.DescribeClusterResponse | None:
    with grpc.insecure_channel(address) as channel:
        try:
            return metadata_pb2_grpc.MetadataStub(channel).DescribeCluster(
                metadata_pb2.DescribeClusterRequest(), timeout=3
            )
        except grpc.RpcError:
            return None


def address_of(backend: DockerBackend, node: int) -> str:
    return backend.bootstrap.split(",")[node - 1]


def fenced_by(backend: DockerBackend, witness: int) -> set[int] | None:
    """The nodes that one of them takes for gone; None where it says nothing."""
    answer = asked(address_of(backend, witness))
    return None if answer is None else {one.node_id for one in answer.brokers if one.fenced}


def accepts(backend: DockerBackend, node: int) -> bool:
    """Whether connections to it can be made."""
    host, _, port = address_of(backend, node).partition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


def around(node: int) -> Mapping[Link, LinkFault]:
    """Cut it off from the other nodes."""
    others = {1, 2, 3} - {node}
    links = [Link(*pair) for other in others for pair in ((node, other), (other, node))]
    return dict.fromkeys(links, CUT)


def test_a_node_that_is_cut_off_is_fenced_and_comes_back(backend: DockerBackend) -> None:
    backend.set_links(around(3))
    wait_until(lambda: fenced_by(backend, 1) == {3}, "node 3 is fenced", timeout_s=SLOW_S)
    # Clients reach it all the same.
    assert accepts(backend, 3)
    backend.set_links({})
    backend.wait_ready(SLOW_S)
    assert fenced_by(backend, 1) == set()


def test_clients_are_cut_off_in_either_direction(backend: DockerBackend) -> None:
    for link in (Link(CLIENTS, 2), Link(2, CLIENTS)):
        backend.set_links({link: CUT})
        assert asked(address_of(backend, 2)) is None
        assert asked(address_of(backend, 1)) is not None
        backend.set_links({})
        wait_until(
            lambda: asked(address_of(backend, 2)) is not None, "it is heard", timeout_s=SLOW_S
        )


def test_all_packets_of_a_node_are_lost_until_it_is_healed(backend: DockerBackend) -> None:
    backend.set_packets(2, PacketFault(loss=100))
    assert asked(address_of(backend, 2)) is None
    for bearable in (PacketFault(duplicate=50), PacketFault(reorder=25, delay_ms=10)):
        backend.set_packets(2, bearable)
        backend.wait_ready(SLOW_S)
    backend.set_packets(2, None)
    backend.wait_ready(SLOW_S)


def test_what_is_broken_outlives_the_node_and_is_healed_with_all_else(
    backend: DockerBackend,
) -> None:
    backend.set_links({Link(CLIENTS, 1): CUT})
    backend.kill(1)
    assert backend.running == [2, 3]
    assert backend.pid(1) is None
    wait_until(lambda: fenced_by(backend, 3) == {1}, "node 1 is fenced", timeout_s=SLOW_S)
    backend.start_node(1)
    wait_until(lambda: fenced_by(backend, 3) == set(), "node 1 is back", timeout_s=SLOW_S)
    assert not accepts(backend, 1)
    backend.pause(2)
    assert asked(address_of(backend, 2)) is None
    assert backend.running == [1, 2, 3]
    backend.heal_all()
    backend.wait_ready(SLOW_S)
    assert accepts(backend, 1)


def left_by(pid: int) -> list[str]:
    """The runs of a process of which something is on the engine."""
    with contextlib.closing(DockerEngine()) as engine:
        return [run for run, owner in engine.owners().items() if f":{pid}:" in owner]


def is_paused(pid: int) -> bool:
    """Whether a node of this process's run is."""
    import docker

    with contextlib.closing(docker.from_env()) as client:
        paused = client.api.containers(filters={"status": "paused", "label": OWNER_LABEL})
    return any(f":{pid}:" in one["Labels"][OWNER_LABEL] for one in paused)


def test_a_run_is_judged_and_leaves_nothing(image: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lossy = {"nemesis": "lossy", "kind": "lossy", "target": "node 1", "parameters": {"loss": 5}}
    faults = write_schedule(
        tmp_path / "faults.json", [(4000, 2000, "kill", "node 2"), (8000, 2000, "pause", "node 3")]
    )
    planned = [{"at_ms": 500, "hold_ms": 2000, "fault": lossy}, *json.loads(faults.read_text())]
    faults.write_text(json.dumps(planned))
    with start(
        *("run", "--backend", "docker", "--backend-set", f"image={image}", "--duration", "20"),
        *("--rate", "500", "--seed", "7", "--schedule", faults, "--recovery", "120"),
        *("--out", run, "--output", "json"),
    ) as process:
        try:
            done = finish(process)
        finally:
            process.kill()
    assert done.status == 0, done.stderr
    assert done.json["valid"] == "true"
    assert done.json["figures"]["faults"]["held"] >= 1
    assert done.json["figures"]["faults"]["failed"] == 0
    assert done.verdict_of("replicas-identical")["looked_at"] > 0
    plan = json.loads((run / "plan.json").read_text())
    assert plan["versions"]["docker"]
    assert plan["versions"]["image"].startswith(f"{image} ")
    for node in (1, 2, 3):
        assert "registered" in (run / f"node-{node}.log").read_text()
    assert left_by(process.pid) == []


def test_ctrl_c_leaves_nothing(image: str, tmp_path: Path) -> None:
    faults = write_schedule(tmp_path / "faults.json", [(1000, 3_600_000, "pause", "node 2")])
    with start(
        *("run", "--backend", "docker", "--backend-set", f"image={image}", "--duration", "3600"),
        *("--rate", "500", "--schedule", faults, "--recovery", "120", "--out", tmp_path / "run"),
    ) as process:
        try:
            wait_until(lambda: is_paused(process.pid), "a node is paused", timeout_s=240)
            assert left_by(process.pid) != []
            process.send_signal(signal.SIGINT)
            done = finish(process)
        finally:
            process.kill()
    assert done.status == 130, done.stderr
    assert left_by(process.pid) == []


def test_an_image_that_is_not_there_is_said_before_anything_starts(
    image: str, tmp_path: Path
) -> None:
    done = chaos(
        *("run", "--backend", "docker", "--backend-set", "image=penstock:none"),
        *("--out", tmp_path / "run"),
    )
    assert done.status == 2
    assert "no image 'penstock:none'" in done.stderr
    assert "next: " in done.stderr
    assert not (tmp_path / "run").exists()


def test_without_an_engine_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(PlanError, match=r"no container engine answers: .*; next: start Docker's"):
        DockerEngine()
