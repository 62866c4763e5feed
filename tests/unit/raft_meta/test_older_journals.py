"""Journals of a version that kept neither voter sets nor directory ids are taken over."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from penstock.raft_meta.journal import COMMAND, NO_OP, VOTERS, LmdbJournal
from penstock.raft_meta.recovery import become_the_only_voter
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import ANY_DIRECTORY, DIRECTORY_ID_BYTES, VoterSet
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.raft_fuzz import Host, Network, open_fast

COMMANDS = [b"old-%d" % number for number in range(6)]


def open_journal(path: Path, node_id: int) -> LmdbJournal:
    return LmdbJournal(path, cluster_id="fuzz", node_id=node_id, open_environment=open_fast)


def make_older(path: Path, node_id: int) -> None:
    """Take out of a journal's file what older versions did not write."""
    journal = open_journal(path, node_id)
    with journal._environment.begin(write=True) as transaction:
        for name in (b"directory", b"voters", b"pledge", b"may-found"):
            transaction.delete(name, db=journal._meta)
    journal.abandon()


def older_journal(directory: Path, node_id: int, *, last: int, commit: int, term: int = 3) -> None:
    """A log up to ``last`` of the same entries on all."""
    path = directory / f"node-{node_id}" / "journal"
    journal = open_journal(path, node_id)
    journal.add(NO_OP, 1, 0)
    journal.add(NO_OP, 2, 1)
    for index in range(3, last + 1):
        journal.add(COMMAND + COMMANDS[index - 3], index, 1)
    journal.setCurrentTerm(term, None)
    journal.setRaftCommitIndex(commit)
    journal.close()
    make_older(path, node_id)


@pytest.fixture
def older(tmp_path):
    """Three nodes of such a version, stopped at once: their logs end where they ended."""
    older_journal(tmp_path, 1, last=6, commit=5)
    older_journal(tmp_path, 2, last=8, commit=6)
    older_journal(tmp_path, 3, last=8, commit=4)
    return tmp_path


def sets_of(host: Host) -> list[VoterSet]:
    """The voter sets in a log."""
    commands = [entry.command for entry in host.journal[:]]
    return [VoterSet.decode(each[1:]) for each in commands if each[:1] == VOTERS]


def directories(host: Host) -> dict[int, bytes]:
    return {member.node_id: member.directory_id for member in host.journal.voters}


def learn(net: Network) -> dict[int, bytes]:
    """Run until the voters' directories are known to all; they are those that the nodes have."""
    hosts = net.hosts.values()
    net.run_until(lambda: all(ANY_DIRECTORY not in directories(host).values() for host in hosts), 5)
    known = {host.node_id: host.journal.directory_id for host in hosts}
    assert [directories(host) for host in hosts] == [known] * len(hosts)
    assert {len(each) for each in known.values()} == {DIRECTORY_ID_BYTES}
    return known


def test_three_older_journals_elect_commit_and_learn_their_directories(older):
    net = Network(older, 3, seed=31)
    for host in net.hosts.values():
        assert directories(host) == dict.fromkeys((1, 2, 3), ANY_DIRECTORY)
        assert host.voter.status().is_voter
    net.wait_leader()
    payload = net.propose()
    learn(net)
    net.settle()
    # What was committed is; and so is more of the log of whoever leads.
    assert net.decided[:6] == COMMANDS
    assert payload in net.decided
    net.close()


def test_what_they_learned_survives_a_restart_and_is_not_logged_again(older):
    net = Network(older, 3, seed=32)
    net.wait_leader()
    known = learn(net)
    net.settle()
    logged = sets_of(net.hosts[1])
    assert len(logged) <= 2
    for host in net.hosts.values():
        net.crash(host, down_s=0.2)
    net.run(0.5)
    assert [directories(host) for host in net.hosts.values()] == [known] * 3
    net.settle()
    net.run(3.0)
    assert [sets_of(host) for host in net.hosts.values()] == [logged] * 3
    net.close()


def test_from_then_on_a_lost_disk_is_no_voter(older):
    net = Network(older, 3, seed=33)
    net.wait_leader()
    learn(net)
    net.settle()
    net.wipe(net.hosts[3])
    net.run(3.0)
    assert not net.hosts[3].is_member
    net.crash(next(net.hosts[n] for n in (1, 2) if net.hosts[n] is not net.leader()), down_s=1e9)
    net.run(3.0)
    assert net.leader() is None  # One voter of three is left, and an empty disk.
    net.close()


@pytest.mark.parametrize("seed", range(8))
def test_they_are_taken_over_through_crashes_and_losses(older, seed):
    net = Network(older, 3, seed=100 + seed, compact_every=10, retained=3)
    net.loss = net.duplication = 0.1
    for _ in range(25):
        net.run(net.rng.uniform(0.05, 0.4))
        net.propose()
        host = net.rng.choice(list(net.hosts.values()))
        if host.voter is None:
            continue
        match net.rng.randrange(4):
            case 0:
                net.crash(host)
            case 1:
                host.crash_before_sync = True
            case 2:
                host.crash_after_sync = True
    net.settle()
    learn(net)
    net.settle()
    net.close()


def test_an_older_snapshot_is_taken_over_with_its_journal(tmp_path):
    for node_id in (1, 2, 3):
        older_journal(tmp_path, node_id, last=8, commit=8)
        path = tmp_path / f"node-{node_id}" / "journal"
        journal = open_journal(path, node_id)
        journal.compact_to(6)
        journal.close()
        make_older(path, node_id)
        state = b"\n".join(COMMANDS[:4])
        SnapshotStore(tmp_path / f"node-{node_id}").save(Snapshot(6, 1, state))
    net = Network(tmp_path, 3, seed=34)
    net.decided = COMMANDS[:4]
    for host in net.hosts.values():
        assert host.journal.voters == VoterSet.of([1, 2, 3])
    net.wait_leader()
    learn(net)
    net.settle()
    assert net.decided[:6] == COMMANDS
    net.close()


def test_a_snapshot_of_an_older_leader_leaves_the_voters_as_they_are(tmp_path):
    older_journal(tmp_path, 1, last=4, commit=3)
    path = tmp_path / "node-1" / "journal"
    journal = open_journal(path, 1)
    journal.found(VoterSet.of([1, 2, 3]))
    journal.reset_to_snapshot(20, 3)
    assert journal.voters == VoterSet.of([1, 2, 3])
    journal.abandon()
    again = open_journal(path, 1)
    assert again.voters == VoterSet.of([1, 2, 3])
    again.abandon()


def test_one_older_journal_alone_needs_nobody_s_leave(tmp_path):
    older_journal(tmp_path, 1, last=8, commit=4)
    net = Network(tmp_path, 1, seed=35)
    net.wait_leader()
    learn(net)
    net.settle()
    assert net.decided[:6] == COMMANDS
    net.close()


def test_an_older_journal_that_is_recovered_is_a_voter_after_every_restart(older):
    found = become_the_only_voter(older / "node-2", cluster_id="fuzz", node_id=2, addresses={})
    assert (found.last_term, found.last_index) == (1, 8)
    shutil.rmtree(older / "node-1")
    shutil.rmtree(older / "node-3")
    net = Network(older, 3, seed=39)
    for _ in range(2):
        net.wait_leader()
        net.settle()
        assert net.voters() == {2}
        net.crash(net.hosts[2], down_s=0.1)
        net.run(0.2)
    assert net.decided[:6] == COMMANDS
    net.close()


# One node after the other.


class Mixed(Network):
    """Nodes of ``old`` are as they were before: what they say names no directory, an entry that
    holds a voter set is malformed to them, and they change no voters.
    """

    def __init__(self, directory: Path, *, seed: int, old: Collection[int]) -> None:
        self.old = set(old)
        super().__init__(directory, 3, seed=seed)

    def start(self, host: Host) -> None:
        super().start(host)
        if host.node_id in self.old:
            host.voter._guard.changing.before_tick = lambda: None

    def _send(self, source: int, target: int, message: raft_pb2.RaftExchangeRequest) -> None:
        if source in self.old:
            message.directory_id = b""
        kinds = {entry.kind for entry in message.append_entries.entries}
        if target in self.old and raft_pb2.RAFT_ENTRY_KIND_VOTERS in kinds:
            return
        super()._send(source, target, message)

    def upgrade(self, node_id: int) -> None:
        """Stop a node, and start it with the new version."""
        host = self.hosts[node_id]
        self.crash(host, down_s=1e9)
        make_older(host.directory / "journal", node_id)
        self.run(1.5)
        self.old.remove(node_id)
        self.start(host)
        self.run(1.0)

    def commits(self) -> None:
        """A command is acknowledged within a few elections' time."""
        asked: list[bytes | None] = []

        def acknowledged() -> bool:
            if not self.acknowledged.isdisjoint(asked):
                return True
            asked.append(self.propose())
            return False

        self.run_until(acknowledged, 10)


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_one_node_after_the_other_is_upgraded_and_the_others_go_on(older, order):
    net = Mixed(older, seed=36, old=(1, 2, 3))
    net.wait_leader()
    for node_id in order:
        net.commits()
        net.upgrade(node_id)
        assert all(not sets_of(net.hosts[old]) for old in net.old)
    net.commits()
    learn(net)
    net.settle()
    assert net.decided[:6] == COMMANDS
    net.close()


def lead(net: Mixed, node_id: int) -> None:
    """Have a node lead, by stopping others for a moment."""

    def leads() -> bool:
        leader = net.leader()
        if leader is not None and leader.node_id != node_id:
            net.crash(leader, down_s=0.3)
            net.run(2.0)
        leader = net.leader()
        return leader is not None and leader.node_id == node_id

    net.run_until(leads, 60)


def test_the_first_one_that_is_upgraded_may_lead_the_others(older):
    """It logs no voter set, which they could not read, before a majority can."""
    net = Mixed(older, seed=37, old=(1, 2, 3))
    net.wait_leader()
    net.upgrade(2)
    lead(net, 2)
    net.commits()
    assert sets_of(net.hosts[2]) == []
    net.upgrade(1)
    net.commits()
    net.upgrade(3)
    net.commits()
    learn(net)
    net.settle()
    net.close()


def test_two_that_are_upgraded_do_not_wait_for_one_that_never_comes_back(older):
    """It is removed, and its directory need not be known for that."""
    net = Mixed(older, seed=38, old=(1, 2, 3))
    net.wait_leader()
    net.crash(net.hosts[3], down_s=1e9)
    for node_id in (1, 2):
        net.upgrade(node_id)
    net.commits()
    net.insist(lambda: net.remove(3))
    net.run(1.0)
    assert net.voters() == {1, 2}
    del net.hosts[3]
    learn(net)
    net.close()
