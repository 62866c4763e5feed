"""A majority's disks are lost for good: one survivor goes on, by an operator's word."""

from __future__ import annotations

import pytest

from penstock.raft_meta.directory_lock import locked
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.recovery import become_the_only_voter, survey
from penstock.wire.errors import DataDirectoryError
from tests.unit.raft_meta.raft_fuzz import Network


def test_a_survivor_goes_on_alone_with_all_it_has_and_others_are_added(tmp_path):
    net = Network(tmp_path, 3, seed=31)
    leader = net.wait_leader()
    for _ in range(60):
        net.propose()
        net.run(0.02)
    survivor = next(host for host in net.hosts.values() if host is not leader)
    acknowledged = set(net.acknowledged)
    net.crash(survivor, down_s=1e9)
    for host in net.hosts.values():
        if host is not survivor:
            net.wipe(host, down_s=1e9)
    before = survey(survivor.directory, cluster_id="fuzz", node_id=survivor.node_id)
    assert before.voters_before == (1, 2, 3)
    found = become_the_only_voter(
        survivor.directory, cluster_id="fuzz", node_id=survivor.node_id, addresses={}
    )
    assert found == before
    net.start(survivor)
    net.wait_leader()
    assert survivor.voter.status().role is Role.LEADER
    net.settle()
    assert acknowledged <= set(survivor.state)
    for host in net.hosts.values():
        if host is not survivor:
            net.insist(lambda node_id=host.node_id: net.add(node_id))
    net.settle()
    assert net.voters() == {1, 2, 3}
    net.close()


def test_an_empty_or_missing_directory_recovers_nothing(tmp_path):
    with pytest.raises(DataDirectoryError, match="holds no metadata log"):
        become_the_only_voter(tmp_path, cluster_id="c", node_id=1, addresses={})
    net = Network(tmp_path, 3, seed=1)
    for host in net.hosts.values():
        host.journal.close()
    with pytest.raises(DataDirectoryError, match="empty metadata log"):
        become_the_only_voter(tmp_path / "node-2", cluster_id="fuzz", node_id=2, addresses={})
    with pytest.raises(DataDirectoryError, match="belongs to"):
        survey(tmp_path / "node-2", cluster_id="other", node_id=2)


def test_a_directory_in_use_is_left_alone(tmp_path):
    with locked(tmp_path), pytest.raises(DataDirectoryError, match="another process"):
        survey(tmp_path, cluster_id="c", node_id=1)
