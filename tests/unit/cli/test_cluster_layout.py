"""Directories of local clusters: made, found again, adapted, refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.broker.config import NodeConfig
from penstock.broker.datadir import lock_directory, read_meta
from penstock.cli import cluster_layout
from penstock.cli.cluster_layout import check_ports, find_base_port, prepare_layout
from penstock.cli.errors import explain
from penstock.raft_meta.credentials import NodeTls
from penstock.wire.errors import AddressInUseError, ConfigurationError, DataDirectoryError

# Ports that tests name and nobody listens on: who else uses them here is no matter.
NAMED = {base + i + d for base in (9092, 21_000, 21_500) for i in range(3) for d in (0, 1000, 2000)}


@pytest.fixture(autouse=True)
def named_ports_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    really = cluster_layout._is_free
    monkeypatch.setattr(cluster_layout, "_is_free", lambda port: port in NAMED or really(port))


def test_a_new_directory_gets_three_nodes_of_one_cluster(tmp_path: Path) -> None:
    layout = prepare_layout(tmp_path / "data")
    assert [plan.address for plan in layout.plans] == [
        "127.0.0.1:9092",
        "127.0.0.1:9093",
        "127.0.0.1:9094",
    ]
    for plan in layout.plans:
        meta = read_meta(plan.directory)
        assert (meta.cluster_id, meta.node_id) == (layout.cluster_id, plan.node_id)
        config = NodeConfig.load(plan.config_path)
        assert config.node_id == plan.node_id
        assert config.roles == {"controller", "broker"}
        assert config.broker_listen == plan.address
        assert config.log_directories == [tmp_path / "data" / f"node-{plan.node_id}" / "logs"]
        assert config.voters == {
            other.node_id: ("127.0.0.1", other.controller_port) for other in layout.plans
        }


def test_a_second_start_finds_the_same_cluster(tmp_path: Path) -> None:
    first = prepare_layout(tmp_path, nodes=2, base_port=21_000)
    again = prepare_layout(tmp_path)
    assert again == first


def test_a_users_own_settings_stay(tmp_path: Path) -> None:
    plan = prepare_layout(tmp_path, nodes=1).plans[0]
    with plan.config_path.open("a") as file:
        file.write('log.level = "debug" # why not\n')
    prepare_layout(tmp_path)
    assert "# why not" in plan.config_path.read_text()
    moved = prepare_layout(tmp_path, base_port=21_500).plans[0]
    config = NodeConfig.load(moved.config_path)
    assert config.log_level == "debug"
    assert config.broker_listen == "127.0.0.1:21500"
    assert config.voters == {1: ("127.0.0.1", 22_500)}


def test_a_moved_cluster_stays_where_it_moved_to(tmp_path: Path) -> None:
    prepare_layout(tmp_path, base_port=21_000)
    prepare_layout(tmp_path, base_port=21_500)
    assert prepare_layout(tmp_path).plans[0].broker_port == 21_500


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("base_port", [None, 21_500])
def test_a_cluster_that_runs_keeps_its_files(tmp_path: Path, base_port: int | None) -> None:
    layout = prepare_layout(tmp_path, base_port=21_000)
    held = [lock_directory(plan.directory) for plan in layout.plans[1:]]
    before = contents(tmp_path)
    wanted = r"a cluster runs in .* \(node 2 uses .*node-2\); stop it first, or choose another"
    with pytest.raises(DataDirectoryError, match=wanted):
        prepare_layout(tmp_path, base_port=base_port)
    for path, content in before.items():
        assert path.read_bytes() == content
    for descriptor in held:
        os.close(descriptor)
    # The nodes that start next must find their directories free.
    assert prepare_layout(tmp_path, base_port=21_500).plans[0].broker_port == 21_500
    for plan in layout.plans:
        os.close(lock_directory(plan.directory))


def test_a_cluster_is_not_moved_to_ports_in_use(tmp_path: Path) -> None:
    first = prepare_layout(tmp_path, nodes=1, base_port=find_base_port(1, first=25_000))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = contents(tmp_path)
        with pytest.raises(AddressInUseError, match=f"port {port} "):
            prepare_layout(tmp_path, base_port=port)
    assert {path: path.read_bytes() for path in before} == before
    assert prepare_layout(tmp_path) == first


def test_a_new_cluster_on_ports_in_use_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port} "):
            prepare_layout(tmp_path / "data", nodes=1, base_port=port)
    assert list(tmp_path.iterdir()) == []


def test_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    prepare_layout(tmp_path, nodes=3)
    with pytest.raises(DataDirectoryError, match="a cluster of 3 nodes, not of 5; start it with"):
        prepare_layout(tmp_path, nodes=5)


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(DataDirectoryError, match=r"is not empty and holds no cluster.*thesis.tex"):
        prepare_layout(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_node_that_lost_its_directory_is_not_made_anew(tmp_path: Path) -> None:
    plan = prepare_layout(tmp_path).plans[1]
    shutil.rmtree(plan.directory)
    before = contents(tmp_path)
    with pytest.raises(DataDirectoryError, match=r"node-2/meta.json is gone") as caught:
        prepare_layout(tmp_path, base_port=21_500)
    step = explain(caught.value).splitlines()[-1]
    assert "no older copy of it" in step
    assert "docs/operating/failures.md" in step
    assert not plan.directory.exists()
    assert {path: path.read_bytes() for path in before} == before


def test_formatting_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    layout = prepare_layout(tmp_path)
    shutil.rmtree(layout.plans[2].directory)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"complete": False}))
    assert prepare_layout(tmp_path) == layout
    assert read_meta(layout.plans[2].directory).cluster_id == layout.cluster_id


def test_few_nodes_keep_fewer_copies_of_what_coordinators_write(tmp_path: Path) -> None:
    for nodes in (1, 3):
        layout = prepare_layout(tmp_path / str(nodes), nodes=nodes)
        config = NodeConfig.load(layout.plans[0].config_path)
        assert config.offsets_topic_replication_factor == nodes
        assert config.transaction_state_topic_replication_factor == nodes


@pytest.mark.parametrize(
    ("nodes", "base_port", "wanted"),
    [
        (0, 9092, "--nodes 0: from 1 to 99"),
        (100, 9092, "--nodes 100: from 1 to 99"),
        (3, 64_600, "--base-port 64600: the ports up to 65602 are needed"),
    ],
)
def test_numbers_that_cannot_work_are_refused(
    tmp_path: Path, nodes: int, base_port: int, wanted: str
) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        prepare_layout(tmp_path / "data", nodes=nodes, base_port=base_port)
    assert not (tmp_path / "data").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    layout = prepare_layout(tmp_path, nodes=2, base_port=find_base_port(2, first=25_000))
    check_ports(layout.plans)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", layout.plans[1].controller_port))
        taken.listen(1)
        wanted = rf"port {layout.plans[1].controller_port} .* node 2 needs it for its controller"
        with pytest.raises(AddressInUseError, match=wanted):
            check_ports(layout.plans)


def test_a_port_in_use_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        base = taken.getsockname()[1] - 2
        assert find_base_port(3, first=base) > base


def test_two_processes_that_look_at_once_find_other_ports() -> None:
    """The nodes of the first are not there yet when the second looks."""
    ours = find_base_port(3, first=25_000)
    assert find_base_port(3, first=ours) == ours
    look = (
        "from penstock.cli.cluster_layout import find_base_port\n"
        f"print(find_base_port(3, first={ours}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], check=True, capture_output=True, text=True
    ).stdout
    assert int(found) > ours


def test_the_file_is_toml_that_says_who_wrote_it(tmp_path: Path) -> None:
    plan = prepare_layout(tmp_path, nodes=1, settings={"log.format": "json"}).plans[0]
    text = plan.config_path.read_text()
    assert text.startswith("# Written by `penstock dev`")
    assert tomllib.loads(text)["log"]["format"] == "json"


def test_a_cluster_under_tls_stays_so_with_the_same_certificates(tmp_path: Path) -> None:
    layout = prepare_layout(tmp_path, nodes=2, base_port=find_base_port(2, first=25_000), tls=True)
    certificates = {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    assert len(certificates) == 7  # The authority's, and two files for each node and clients.
    assert prepare_layout(tmp_path) == layout
    assert {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()} == certificates
    for plan in layout.plans:
        config = NodeConfig.load(plan.config_path)
        assert config.tls_files is not None
        NodeTls(config.tls_files, cluster_id=layout.cluster_id, node_id=plan.node_id)
    # What is lost cannot be signed any more: then all are new.
    (tmp_path / "tls" / "node-2-key.pem").unlink()
    prepare_layout(tmp_path)
    assert (tmp_path / "tls" / "ca.pem").read_bytes() != certificates[tmp_path / "tls" / "ca.pem"]
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "tls").glob("*-key.pem"))


def test_a_cluster_without_tls_is_not_put_under_it(tmp_path: Path) -> None:
    layout = prepare_layout(tmp_path, nodes=1, base_port=find_base_port(1, first=25_000))
    assert layout.client_tls is None
    # What a shell has for commands would be half of a node's settings.
    assert {"PENSTOCK_TLS_CA", "PENSTOCK_TLS_KEY"} <= layout.environment_names
    with pytest.raises(DataDirectoryError, match="holds a cluster without TLS"):
        prepare_layout(tmp_path, tls=True)


def test_nodes_behind_another_host_are_reached_there_alone(tmp_path: Path) -> None:
    layout = prepare_layout(
        tmp_path, nodes=2, base_port=21_000, advertised_host="127.0.0.2", has_files_beside=True
    )
    assert prepare_layout(tmp_path) == layout
    for plan in layout.plans:
        assert plan.config_path == tmp_path / f"node-{plan.node_id}.toml"
        assert plan.log_path == tmp_path / f"node-{plan.node_id}.log"
        config = NodeConfig.load(plan.config_path)
        assert config.broker_listen == f"127.0.0.1:{plan.broker_port}" == plan.address
        assert config.advertised == ("127.0.0.2", plan.broker_port)
        assert plan.advertised == f"127.0.0.2:{plan.broker_port}"
        assert config.controller_listen == f"127.0.0.1:{plan.controller_port}"
        assert config.controller_address == ("127.0.0.2", plan.controller_port)
        assert config.frames_address == ("127.0.0.1", plan.frames_port)
        assert set(config.voters.values()) == {("127.0.0.2", 22_000), ("127.0.0.2", 22_001)}


def test_nodes_with_hosts_of_their_own_listen_there_and_need_no_port_here(tmp_path: Path) -> None:
    hosts = ["10.0.0.1", "10.0.0.2"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        layout = prepare_layout(
            tmp_path,
            nodes=2,
            base_port=port,
            hosts=hosts,
            settings={"controller.insecure.allow": True},
        )
    assert prepare_layout(tmp_path).plans == layout.plans
    for number, plan in enumerate(layout.plans):
        config = NodeConfig.load(plan.config_path)
        assert plan.address == plan.advertised == f"{hosts[number]}:{port + number}"
        assert config.broker_listen == plan.address
        assert config.controller_listen == f"{hosts[number]}:{plan.controller_port}"
        assert config.voters[1] == ("10.0.0.1", layout.plans[0].controller_port)
        assert not plan.is_behind_another


def test_a_port_for_followers_is_looked_at_where_it_is_known(tmp_path: Path) -> None:
    base = find_base_port(1, first=25_000, frames=True)
    with socket.create_server(("127.0.0.1", base + 2_000)):
        check_ports(prepare_layout(tmp_path / "direct", nodes=1, base_port=base).plans)
        with pytest.raises(AddressInUseError, match=f"port {base + 2_000} .* its followers"):
            prepare_layout(
                tmp_path / "behind", nodes=1, base_port=base, advertised_host="127.0.0.2"
            )
        assert find_base_port(1, first=base, frames=True) > base
