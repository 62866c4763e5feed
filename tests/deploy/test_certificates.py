"""What the objects ask cert-manager for is what nodes take, and take of nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.certificates import Authority, write_files
from penstock.raft_meta.credentials import NodeTls
from penstock.wire.errors import ConfigurationError
from tests.deploy.objects import Object, of_kind, only


def test_a_node_takes_the_certificate_that_it_is_given(
    objects: list[Object], variant: str, tmp_path: Path
) -> None:
    if variant == "dev":
        assert not of_kind(objects, "Certificate")
        return
    authority = Authority()
    cluster_id = only(objects, "Secret", "penstock-cluster")["stringData"]["cluster-id"]
    seen = 0
    for one in of_kind(objects, "Certificate"):
        name, spec = one["metadata"]["name"], one["spec"]
        if "dnsNames" not in spec:
            continue
        issued = authority.issue(name, spec["dnsNames"])
        files = write_files(tmp_path / name, "tls", authority, issued)
        node = int(name.rpartition("-")[2])
        assert NodeTls(files, cluster_id=cluster_id, node_id=node).current()
        with pytest.raises(ConfigurationError):
            NodeTls(files, cluster_id=cluster_id, node_id=node + 1)
        seen += 1
    assert seen == (6 if variant == "production-dedicated" else 3)


def test_the_clients_certificate_is_no_nodes(
    objects: list[Object], variant: str, tmp_path: Path
) -> None:
    if variant == "dev":
        assert not of_kind(objects, "Certificate")
        return
    spec = only(objects, "Certificate", "penstock-client")["spec"]
    issued = Authority().issue(spec["commonName"])
    files = write_files(tmp_path, "client", Authority(), issued)
    with pytest.raises(ConfigurationError):
        NodeTls(files, cluster_id="CHANGE-ME", node_id=0)
