"""docs/operating/security.md, followed to the letter: its commands, then a cluster of three."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.integration.cluster import Cluster

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def documented_commands() -> list[str]:
    text = (ROOT / "docs/operating/security.md").read_text(encoding="utf-8")
    steps = text.partition("## Step by step")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", steps, re.DOTALL)


def here(command: str, cluster: Cluster) -> str:
    """A command with this machine's names in the places of the examples'."""
    for example, own in (
        ("CLUSTER_ID=$(openssl rand -hex 11)", f"CLUSTER_ID={cluster.cluster_id}"),
        ("HOST=broker-$N.example", "HOST=localhost"),
        ("broker-1.example:9092", cluster.nodes[1].address),
        *(
            (f"/var/lib/penstock/data --node-id {number}", f"{node.directory} --node-id {number}")
            for number, node in cluster.nodes.items()
        ),
    ):
        command = command.replace(example, own)
    return command


def use(cluster: Cluster, directory: Path) -> None:
    """Put the files where the nodes' settings name them."""
    for node in cluster.nodes.values():
        for source, target in (
            ("ca.pem", "ca.pem"),
            (f"node-{node.node_id}.pem", "node.pem"),
            (f"node-{node.node_id}-key.pem", "node-key.pem"),
        ):
            shutil.copy(directory / source, node.directory / source)
            (node.directory / source).rename(node.directory / target)


def configure(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        with node.config.open("a", encoding="utf-8") as file:
            for key, name in (("ca", "ca"), ("certificate", "node"), ("key", "node-key")):
                file.write(f'tls.{key} = "{node.directory / name}.pem"\n')
            # The certificates are made out to the host's name.
            node.address = node.address.replace("127.0.0.1", "localhost")
            file.write(f'broker.advertised = "{node.address}"\n')


def run(script: str, directory: Path) -> str:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert ended.returncode == 0, f"{script}\n{ended.stderr}"
    return ended.stdout


def test_the_documented_commands_make_a_cluster_under_tls(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    cluster = Cluster(tmp_path / "cluster", may_found=False)
    configure(cluster)
    *making, checking, describing = [here(one, cluster) for one in documented_commands()]
    run("\n".join(making), work)
    told = run(checking, work)
    assert told.count(": OK") == 4
    assert f"DNS:node-1.{cluster.cluster_id}.penstock, DNS:localhost" in told
    use(cluster, work)
    cluster.credentials = client_of(work)
    try:
        cluster.start()
        assert run(describing, work).count("live") == 3
        options = "--tls-ca ca.pem --tls-cert client.pem --tls-key client-key.pem"
        at = f"-b {cluster.nodes[1].address} {options}"
        run(f"penstock topics create orders {at} && echo one | penstock produce orders {at}", work)
        # The nodes' certificates, and nobody's restart.
        pids = [node.process.pid for node in cluster.nodes.values() if node.process is not None]
        run("\n".join(making[1:3]), work)
        use(cluster, work)
        reading = "penstock consume orders --from-beginning --timeout 10 --max-records 1"
        read = run(f"{reading} {at}", work)
        assert read.split() == ["one"]
        served = run(
            f"(openssl s_client -connect {cluster.nodes[1].address} -alpn h2 -CAfile ca.pem "
            "-cert client.pem -key client-key.pem </dev/null 2>/dev/null || true) "
            "| openssl x509 -noout -serial; openssl x509 -in node-1.pem -noout -serial",
            work,
        ).split()
        assert len(served) == 2
        assert len(set(served)) == 1
        assert pids == [
            node.process.pid for node in cluster.nodes.values() if node.process is not None
        ]
    finally:
        cluster.close()


def client_of(directory: Path) -> grpc.ChannelCredentials:
    ca, key, certificate = (
        (directory / name).read_bytes() for name in ("ca.pem", "client-key.pem", "client.pem")
    )
    return grpc.ssl_channel_credentials(ca, key, certificate)
