"""The first start of a cluster: it is founded once, by all, and never by an empty disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import structlog

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.rules.founding import IN_USE
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voter import Voter
from penstock.v1 import raft_pb2
from tests.support import eventually
from tests.unit.raft_meta.founded import directory_of, voter_set
from tests.unit.raft_meta.lone_voter import Message, append, entry
from tests.unit.raft_meta.raft_fuzz import TIMING, Network, open_fast


class Fresh:
    """A node with an empty directory, whose peers are the test."""

    def __init__(
        self,
        directory: Path,
        node_id: int,
        configured=(1, 2, 3),
        *,
        may_found=True,
        directory_id=None,
    ) -> None:
        self.may_found = may_found
        self.directory_id = directory_id or directory_of(node_id)
        self.directory, self.node_id, self.configured = directory, node_id, configured
        self.now_s = 10.0
        self.open()

    def open(self) -> None:
        self.journal = LmdbJournal(
            self.directory / "journal",
            cluster_id="c",
            node_id=self.node_id,
            open_environment=open_fast,
            new_directory_id=lambda: self.directory_id,
            may_found=self.may_found,
        )
        self.voter = Voter(
            node_id=self.node_id,
            voters=self.configured,
            addresses={n: (f"host-{n}", 1) for n in self.configured},
            journal=self.journal,
            snapshots=SnapshotStore(self.directory),
            timing=TIMING,
            rng=random.Random(1),
            retained_entries=2,
            now_s=self.now_s,
        )

    def crash(self) -> None:
        self.journal.abandon()
        self.open()

    def tell(self, peer: int | None = None, message: Message | None = None):
        if peer is not None:
            self.voter.receive(peer, message, self.now_s)
        return self.voter.step(self.now_s)[1]

    def wait(self, seconds: float):
        self.now_s += seconds
        return self.tell()


@pytest.fixture
def fresh(tmp_path):
    made: list[Fresh] = []

    def make(node_id: int, configured=(1, 2, 3), **named) -> Fresh:
        made.append(Fresh(tmp_path / str(len(made)), node_id, configured, **named))
        return made[-1]

    yield make
    for each in made:
        each.journal.abandon()


FOUNDER = directory_of(1)


def invitation(directory=FOUNDER, node_ids=(1, 2, 3), term=0) -> Message:
    return Message(
        term=term, directory_id=directory, invitation=raft_pb2.Invitation(node_ids=node_ids)
    )


def acceptance(node_id: int, *, accepted=True, directory=None, founder=FOUNDER) -> Message:
    reply = raft_pb2.InvitationReply(accepted=accepted, founder_directory_id=founder)
    return Message(directory_id=directory or directory_of(node_id), invitation_reply=reply)


def replies(messages) -> list[tuple[bool, str]]:
    answers = [m.invitation_reply for _, m in messages if m.HasField("invitation_reply")]
    return [(answer.accepted, answer.reason) for answer in answers]


def test_the_founder_waits_for_every_one_and_then_founds(fresh):
    node = fresh(1)
    assert {peer for peer, m in node.tell() if m.HasField("invitation")} == {2, 3}
    node.tell(2, acceptance(2))
    for _ in range(20):
        assert {peer for peer, _ in node.wait(0.2)} == {3}
    assert node.voter.status().awaited == (3,)
    assert node.journal.is_fresh
    said = node.tell(3, acceptance(3))
    assert node.journal.voters == voter_set([1, 2, 3])
    assert {peer for peer, m in said if m.HasField("pre_vote")} == {2, 3}  # At once.


def test_a_refusal_takes_an_acceptance_back(fresh):
    node = fresh(1)
    node.tell(2, acceptance(2))
    node.tell(2, acceptance(2, accepted=False))
    node.tell(3, acceptance(3))
    assert node.journal.is_fresh
    assert node.voter.status().awaited == (2,)


def test_strangers_and_nameless_directories_do_not_count(fresh):
    node = fresh(1)
    node.tell(2, acceptance(2))
    node.tell(
        3,
        Message(
            directory_id=b"x", invitation_reply={"accepted": True, "founder_directory_id": FOUNDER}
        ),
    )
    node.tell(4, acceptance(4))
    assert node.voter.status().awaited == (3,)


def test_a_promise_to_an_earlier_directory_of_the_founders_is_void(fresh):
    """It came late, or twice; meanwhile the cluster was founded, and the founder's disk lost."""
    node = fresh(1, directory_id=b"E" * 16)
    for peer in (2, 3):
        node.tell(peer, acceptance(peer))
    assert node.journal.is_fresh
    assert node.voter.status().awaited == (2, 3)


def test_who_belongs_to_a_cluster_already_says_so_to_whoever_would_found_one(fresh):
    """However the settings of the two have come apart since."""
    member = fresh(3)
    member.journal.found(voter_set([1, 3]))
    member.tell(1, append(5, (1, 0)))
    said = member.tell(1, invitation(b"E" * 16, node_ids=(1, 3, 4)))
    assert (False, IN_USE) in replies(said)
    founder = fresh(1, directory_id=b"E" * 16)
    for _, message in said:
        message.directory_id = directory_of(3)
        message.term = 5
        founder.tell(3, message)
    assert founder.voter.status().founding_refusals == {3: IN_USE}
    assert founder.voter.status().awaited == (2, 3)


def test_whoever_has_a_term_promises_nothing(fresh):
    node = fresh(1)
    for peer in (2, 3):
        message = acceptance(peer)
        message.term = 1
        node.tell(peer, message)
    assert node.voter.status().role is not Role.LEADER
    assert node.journal.voters is None


def test_the_only_controller_founds_at_once_if_it_may(fresh):
    node = fresh(1, (1,))
    node.tell()
    assert node.voter.status().role is Role.LEADER
    assert node.journal.voters == voter_set([1])


@pytest.mark.parametrize("configured", [(1,), (1, 2), (1, 2, 3)])
def test_a_founder_without_the_permission_waits_to_be_added(fresh, configured):
    """Those whom it knows of may all have lost their disks, of a cluster that has grown since."""
    node = fresh(1, configured, may_found=False)
    for _ in range(20):
        assert node.wait(1.0) == []
    for peer in configured[1:]:
        node.tell(peer, acceptance(peer))
    assert node.wait(1.0) == []
    assert node.journal.is_fresh
    status = node.voter.status()
    assert status.needs_permission
    assert status.awaited == ()


def test_who_is_no_founder_needs_no_permission(fresh):
    node = fresh(2, may_found=False)
    assert not node.voter.status().needs_permission
    assert replies(node.tell(1, invitation())) == [(True, "")]


def test_a_directory_in_use_takes_no_permission(fresh):
    node = fresh(1, (1, 2), may_found=False)
    node.tell(2, append(4, (1, 0), entry(2, 4)))
    node.may_found = True
    node.crash()
    assert not node.journal.may_found


def test_the_permission_to_found_is_kept_by_the_directory(fresh):
    node = fresh(1, (1,))
    node.may_found = False
    node.crash()
    node.tell()
    assert node.voter.status().role is Role.LEADER


@pytest.mark.parametrize(("founders", "grown"), [(1, 3), (2, 5)])
def test_the_founders_of_a_grown_cluster_found_no_other_on_new_disks(tmp_path, founders, grown):
    """Their files still name them alone, and the others are not heard."""
    net = Network(tmp_path, founders, seed=21)
    net.wait_leader()
    while len(net.hosts) < grown:
        host = net.join()
        net.insist(lambda node_id=host.node_id: net.add(node_id))
        net.settle()
    assert net.voters() == set(range(1, grown + 1))
    lost = [net.hosts[number] for number in range(1, founders + 1)]
    for host in lost:
        net.crash(host, down_s=1e9)
    net.run(3.0)
    ours = {host.node_id for host in lost}
    net.cut = lambda a, b: (a in ours) != (b in ours)
    for host in lost:
        net.wipe(host)
        net.start(host)
    net.run(5.0)
    for host in lost:
        assert host.voter.status().role is not Role.LEADER
        assert host.journal.is_fresh
    net.close()


@pytest.mark.parametrize("configured", [(1, 2, 3), (1, 3)])
def test_nobody_but_the_founder_founds_or_stands(fresh, configured):
    node = fresh(2, configured)
    for _ in range(20):
        assert node.wait(1.0) == []
    assert node.voter.status().term == 0
    assert node.journal.is_fresh


def test_a_promise_is_given_to_one_directory_and_kept(fresh):
    node = fresh(2)
    assert replies(node.tell(1, invitation())) == [(True, "")]
    node.crash()
    assert replies(node.tell(1, invitation())) == [(True, "")]
    ((accepted, reason),) = replies(node.tell(1, invitation(directory_of(11))))
    assert not accepted
    assert "another directory of the founder's" in reason


@pytest.mark.parametrize(
    ("peer", "message", "reason"),
    [
        (3, invitation(directory_of(3)), "controller.quorum.voters"),  # Not the founder.
        (1, invitation(node_ids=(1, 2)), "controller.quorum.voters"),
        (1, invitation(b""), "no id"),
    ],
)
def test_other_invitations_are_refused(fresh, peer, message, reason):
    node = fresh(2)
    ((accepted, said),) = replies(node.tell(peer, message))
    assert not accepted
    assert reason in said
    assert node.journal.pledge == b""


def test_a_directory_that_is_in_use_makes_no_promise(fresh):
    node = fresh(2)
    node.tell(3, append(4, (1, 0), entry(2, 4)))
    ((accepted, reason),) = replies(node.tell(1, invitation()))
    assert not accepted
    assert "in use" in reason


def test_the_first_leader_logs_the_voters_before_any_command(tmp_path):
    net = Network(tmp_path, 3, seed=3)
    leader = net.wait_leader()
    net.propose(leader)
    net.settle()
    for host in net.hosts.values():
        assert host.voter.status().voters_index == 3
        assert host.is_member
    net.close()


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_disk_that_is_lost_during_the_founding_founds_no_second_cluster(tmp_path, lost):
    """Whenever it happens, at most one set of voters comes to be."""
    for number in range(12):
        net = Network(tmp_path / str(number), 3, seed=number)
        net.run(0.0004 * number)
        net.wipe(net.hosts[lost], down_s=0.01)
        net.run(5.0)
        founded = {
            host.journal.voters.encode()
            for host in net.hosts.values()
            if host.voter is not None and host.journal.voters is not None
        }
        assert len(founded) <= 1
        net.close()


@pytest.mark.parametrize("wiped", [1, 2, 3])
def test_an_empty_disk_never_helps_to_elect_anybody(tmp_path, wiped):
    """Two of three lose their disks: the third alone is no majority, whatever they say."""
    net = Network(tmp_path, 3, seed=5)
    net.wait_leader()
    for _ in range(5):
        net.propose()
        net.run(0.05)
    terms = {host.voter.status().term for host in net.hosts.values()}
    for host in list(net.hosts.values()):
        if host.node_id != wiped:
            net.wipe(host, down_s=0.1)
    net.run(10.0)
    assert net.leader() is None
    assert net.hosts[wiped].voter.status().term == max(terms)
    net.close()


def test_who_founds_is_known_to_all(fresh):
    assert fresh(1).voter.status().founder_id == 1
    assert fresh(3).voter.status().founder_id == 1


async def test_a_node_that_is_no_founder_names_it_in_its_log(tmp_path):
    voters = {1: ("127.0.0.1", 1), 2: ("127.0.0.1", 2)}
    config = ControllerConfig(
        node_id=2, cluster_id="c", data_dir=tmp_path, listen=("127.0.0.1", 0), voters=voters
    )
    quorum = RaftQuorum(config, None)
    await quorum.start()
    try:
        await eventually(lambda: quorum.status().founder_id == 1)
        with structlog.testing.capture_logs() as lines:
            quorum._remind()
    finally:
        await quorum.stop()
    [line] = [line for line in lines if line["log_level"] == "warning"]
    assert (line["event"], line["founder"]) == ("this controller knows of no voters", 1)
    assert "start node 1, which founds it" in line["next_step"]
