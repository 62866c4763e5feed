"""What pysyncobj falls for as it is shipped, and the guarded voter does not.

Each attack runs against both. That it does harm to the bare engine is the negative control: an
attack that does none would prove nothing about the guard.
"""

from __future__ import annotations

import builtins
import os
import pickle
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from penstock.raft_meta import engine
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.rules import replicating
from penstock.raft_meta.voter import Committed
from penstock.v1 import raft_pb2
from penstock.wire.errors import DataDirectoryError
from tests.unit.raft_meta.attack_clusters import (
    AttackedCluster,
    GuardedCluster,
    Packet,
    ShippedCluster,
    shipped_modules,
)
from tests.unit.raft_meta.lone_voter import Lone, append, entry

# The engine as shipped leaves files open (J:95).
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(params=["as shipped", "guarded"])
def attacked(request, tmp_path) -> Iterator[object]:
    """A function that makes a cluster of so many nodes."""
    made: list[ShippedCluster | GuardedCluster] = []

    def make(count: int) -> AttackedCluster:
        guarded = request.param == "guarded"
        made.append(GuardedCluster(count) if guarded else ShippedCluster(count, tmp_path))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def judge(cluster: AttackedCluster, harm: object) -> None:
    """``harm`` is true or not empty where the attack succeeded."""
    if isinstance(cluster, ShippedCluster):
        assert harm, "the negative control does no harm: the attack proves nothing"
    else:
        assert not harm


def test_a_duplicated_short_batch_does_not_cut_acknowledged_writes(attacked):
    """S:991-1006. AppendEntries always truncates after prevLogIdx."""
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run()
    cluster.propose(1, b"first")
    cluster.run({1, 2}, 3)
    short = cluster.last(1, 2, "append")
    for number in range(40):
        cluster.propose(1, b"write-%d" % number)
    cluster.run({1, 2}, 3)
    assert len(cluster.acknowledged) == 41
    cluster.deliver(short)
    cluster.elect(2, {2, 3})
    cluster.run({2, 3}, 5)
    judge(cluster, cluster.acknowledged - set(cluster.values(3)))


def test_a_stale_acknowledgement_commits_nothing(attacked):
    """S:1070-1106. next_node_idx carries no term: two of five are taken for a majority."""
    cluster = attacked(5)
    cluster.elect(1)
    cluster.run()
    cluster.blocked = lambda packet: (packet.source, packet.kind) == (3, "append_reply")
    for number in range(7):
        cluster.propose(1, b"never-%d" % number)
    cluster.run({1, 3}, 2)
    stale = cluster.last(3, 1, "append_reply")
    cluster.blocked = lambda _packet: False
    cluster.elect(2, {2, 4, 5})
    cluster.run(rounds=10)
    cluster.elect(1, {1, 3, 4, 5})
    for number in range(5):
        cluster.propose(1, b"new-%d" % number)
    for _ in range(4):
        cluster.run({1, 4})
        cluster.deliver(stale)
    cluster.elect(5, {2, 3, 5})
    cluster.run({2, 3, 5}, 5)
    judge(cluster, cluster.acknowledged - set(cluster.values(5)))


def test_a_snapshot_message_commits_nothing_that_it_does_not_cover(attacked):
    """S:1022-1035. A snapshot's first part moves the commit index over an unverified log."""
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run(rounds=3)
    for number in range(3):
        cluster.propose(1, b"lost-%d" % number)
    cluster.run({1}, 2)
    cluster.elect(2, {2, 3})
    for number in range(12):
        cluster.propose(2, b"kept-%d" % number)
    cluster.run({2, 3}, 5)
    cluster.compact(2)
    parts: list[Packet] = []

    def all_but_the_first(packet: Packet) -> bool:
        if packet.kind != "snapshot":
            return False
        parts.append(packet)
        return len(parts) > 1

    cluster.blocked = all_but_the_first
    cluster.run({1, 2, 3}, 8)
    assert parts
    judge(cluster, cluster.acknowledged - set(cluster.values(2)))


def test_a_kill_between_snapshot_and_log_trim_loses_nothing(attacked):
    """S:1489-1495. A log whose first entries differ from the dump is cleared at start."""
    cluster = attacked(3)
    cluster.elect(1)
    for number in range(5):
        cluster.propose(1, b"early-%d" % number)
    cluster.run(rounds=6)
    cluster.begin_compaction(2)
    for number in range(20):
        cluster.propose(1, b"late-%d" % number)
    for _ in range(3):  # Node 2 answers, but does nothing else.
        cluster.now_s += 0.16
        cluster.tick(1)
        cluster.exchange({1, 2})
    cluster.tick(1)
    assert len(cluster.acknowledged) == 25
    cluster.restart(2)
    cluster.tick(2)
    cluster.elect(2, {2, 3})
    cluster.run({2, 3}, 5)
    judge(cluster, cluster.acknowledged - set(cluster.values(3)))


def elect_by_a_vote_alone(cluster: AttackedCluster) -> None:
    """Node 1 leads by the vote of node 2, which has nothing of it in its log."""
    cluster.blocked = lambda packet: packet.kind == "append"
    cluster.elect(1, {1, 2})
    cluster.blocked = lambda _packet: False


def test_a_vote_survives_the_loss_of_power(attacked, monkeypatch):
    """J:160-164, Z:93. No fsync on any path that writes: two leaders in one term."""
    synced: list[object] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr(shipped_modules().journal.ResizableFile, "flush", synced.append)
    cluster = attacked(3)
    elect_by_a_vote_alone(cluster)
    assert synced == []  # The cluster as shipped may therefore forget everything.
    cluster.lose_power(2)
    cluster.stands(3, {2, 3})
    judge(cluster, [term for term, leaders in cluster.leaders.items() if len(leaders) > 1])


def test_the_commit_index_is_never_ahead_of_the_log(attacked):
    """S:176, 1499. It is persisted apart: a leader then acknowledges with no replica."""
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run(rounds=3)
    cluster.copy_journal(1)
    for number in range(10):
        cluster.propose(1, b"old-%d" % number)
    cluster.run({1, 2}, 20)
    cluster.lose_journal_tail(1)
    cluster.elect(1, {1, 3})
    cluster.propose(1, b"alone")
    cluster.run({1}, 3)
    cluster.elect(3, {2, 3})
    cluster.run({2, 3}, 5)
    judge(cluster, cluster.acknowledged - set(cluster.values(3)))


def test_pipelined_refusals_do_not_keep_a_follower_behind_for_ever(attacked, monkeypatch):
    """S:985-990, 1267-1337. Each refusal overwrites the one before, and takes back its step."""
    for module in (replicating, engine):  # The engine's own default, so that both pipeline alike.
        monkeypatch.setattr(module, "MAX_BATCH_BYTES", 1 << 16)
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run(rounds=3)
    for number in range(3):
        cluster.propose(1, b"diverging-%d" % number)
    cluster.run({1}, 2)
    cluster.elect(2, {2, 3})
    for number in range(12):
        cluster.propose(2, b"%d" % (number % 10) * 40_000)
    cluster.run({2, 3}, 5)
    cluster.elect(3, {2, 3})
    cluster.run({1, 2, 3}, 200)
    judge(cluster, cluster.values(1) != cluster.values(3))


def test_a_damaged_vote_is_not_taken_for_none(attacked):
    """J:152-158. Errors in reading the term and vote are swallowed: it votes again."""
    cluster = attacked(3)
    elect_by_a_vote_alone(cluster)
    try:
        cluster.damage_vote(2)
    except DataDirectoryError:
        assert isinstance(cluster, GuardedCluster)
    else:
        cluster.stands(3, {2, 3})
    judge(cluster, [term for term, leaders in cluster.leaders.items() if len(leaders) > 1])


def test_a_vote_delivered_again_and_again_elects_nobody(attacked):
    """S:1063-1068. Votes are counted by message, not by voter."""
    cluster = attacked(5)
    cluster.blocked = lambda packet: packet.kind in ("request_vote", "vote")
    assert not cluster.stands(1)
    cluster.deliver(cluster.last(1, 2, "request_vote"))
    for _ in range(5):
        cluster.deliver(cluster.last(2, 1, "vote"))
    judge(cluster, cluster.leads(1))
    cluster.deliver(cluster.last(1, 3, "request_vote"))
    cluster.deliver(cluster.last(3, 1, "vote"))
    assert cluster.leads(1)


def changes_of_leader(cluster: AttackedCluster) -> int:
    return sum(len(leaders) for leaders in cluster.leaders.values())


def test_a_voter_that_hears_nobody_unseats_nobody(attacked):
    """S:920. Without PreVote and stickiness a one-way link changes the leader all the time."""
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run(rounds=3)
    cluster.blocked = lambda packet: packet.target == 3
    cluster.run(rounds=60 * 6)  # A minute.
    judge(cluster, changes_of_leader(cluster) > 20)
    if isinstance(cluster, GuardedCluster):
        assert changes_of_leader(cluster) == 1


def test_a_leader_that_is_alone_stops_leading_soon(attacked):
    """config.py:57. The leader's own fallback takes 30 s."""
    cluster = attacked(3)
    cluster.elect(1)
    cluster.run(rounds=3)
    cluster.run({1}, 10)
    judge(cluster, cluster.leads(1))


# Where the two have too little in common for one test.


def test_an_error_in_a_callback_applies_a_command_twice_as_shipped(tmp_path):
    """S:714-729. The entry is not counted as applied when anything raises."""
    cluster = ShippedCluster(3, tmp_path)
    cluster.elect(1)
    cluster.propose(1, b"once", callback_fails=True)
    cluster.run(rounds=6)
    assert cluster.values(1) == [b"once", b"once"]
    assert cluster.values(2) == [b"once"]
    cluster.close()


class Stumbling:
    """A state machine that does half of a command and then raises."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []

    def apply(self, _index: int, _term: int, payload: bytes) -> bytes:
        self.applied.append(payload)
        raise ZeroDivisionError

    def freeze(self) -> bytes:
        raise AssertionError

    def install(self, index: int, snapshot: bytes) -> None:
        raise AssertionError


async def test_an_error_in_the_state_machine_ends_the_controller(tmp_path):
    machine = Stumbling()
    config = ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="c",
        data_dir=tmp_path / "data",
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
    )
    quorum = RaftQuorum(config, machine)
    await quorum.start()
    quorum._on_output([Committed(2, 1, b"x", -1), Committed(3, 1, b"y", -1)], [], 3)
    with pytest.raises(ZeroDivisionError):
        await quorum.wait_failed()
    quorum._on_output([Committed(2, 1, b"x", -1)], [], 2)
    assert machine.applied == [b"x"]
    await quorum.stop()


class Evil:
    """Unpickling it runs what it says."""

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("import builtins; builtins.penstock_was_here = True",))


@pytest.fixture
def evil() -> Iterator[bytes]:
    yield pickle.dumps(Evil())
    if hasattr(builtins, "penstock_was_here"):
        del builtins.penstock_was_here


def test_any_client_runs_code_as_shipped(evil):
    """TC:291. Whatever comes on a connection is unpickled, before anything is checked."""
    shipped = shipped_modules()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    poller = shipped.poller.createPoller("auto")
    connection = shipped.tcp_connection.TcpConnection(poller, socket=ours)
    packed = zlib.compress(evil)
    theirs.send(struct.pack("i", len(packed)) + packed)
    poller.poll(0)
    assert hasattr(builtins, "penstock_was_here")
    connection.disconnect()
    theirs.close()


def test_nothing_that_a_client_sends_is_run(evil, tmp_path: Path):
    for raw in (evil, struct.pack("i", len(evil)) + zlib.compress(evil)):
        with pytest.raises(DecodeError):
            raft_pb2.RaftExchangeRequest.FromString(raw)
    lone = Lone(tmp_path)
    lone.tell(2, append(1, (1, 0), entry(2, 1, b"\x00" + evil), entry(3, 1, evil), commit=3))
    assert [event.payload for event in lone.of(Committed)] == [b"\x00" + evil, evil]
    assert not hasattr(builtins, "penstock_was_here")
    lone.journal.abandon()
