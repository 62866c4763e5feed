from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.raft_meta.credentials import NodeTls

SAID = "others than the node's user may read tls.key"


def events(directory: Path, mode: int) -> list[str]:
    authority = Authority()
    issued = issue_node(authority, 1, "a-cluster")
    files = write_files(directory, "node", authority, issued)
    files.key.chmod(mode)
    with capture_logs() as lines:
        NodeTls(files, cluster_id="a-cluster", node_id=1)
    return [line["event"] for line in lines]


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_of_the_nodes_user_is_for_nobody_else(tmp_path: Path, mode: int, warns: bool) -> None:
    assert (SAID in events(tmp_path, mode)) == warns


@pytest.mark.parametrize(("mode", "warns"), [(0o440, False), (0o444, True)])
def test_a_key_that_kubernetes_gives_to_the_nodes_group_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, warns: bool
) -> None:
    # A Secret's files belong to root; fsGroup is how a node reads them, and all that it can get.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 10001)
    assert (SAID in events(tmp_path, mode)) == warns


def test_a_key_of_a_group_that_is_not_the_nodes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 10001)
    monkeypatch.setattr(os, "getegid", lambda: 10001)
    monkeypatch.setattr(os, "getgroups", lambda: [10001])
    assert SAID in events(tmp_path, 0o440)
