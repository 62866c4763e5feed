"""Whoever is sent a snapshot gets the log after it too, however fast commands come in."""

from __future__ import annotations

import pytest

from penstock.raft_meta import transfer
from penstock.raft_meta.rules import snapshotting
from tests.unit.raft_meta.leading_voter import Leader
from tests.unit.raft_meta.lone_voter import reply
from tests.unit.raft_meta.raft_fuzz import Host, Network

SMALL_BYTES = 60  # Of a state of some thousand: a transfer takes as long as many snapshots.


class Busy(Network):
    """With one timer for each host: those of all its steps would be most of the work."""

    def _wake(self, host: Host, at_s: float) -> None:
        self._due_s = {**getattr(self, "_due_s", {}), host.node_id: at_s}

        def act() -> None:
            if host.voter is not None and self._due_s[host.node_id] == at_s:
                self._guarded(host, lambda _voter: None)

        self._push(at_s, act)


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", SMALL_BYTES)
    net = Busy(tmp_path, 3, seed=5, compact_every=50, retained=10)
    net.delay_s = (0.009, 0.011)
    net.wait_leader()
    yield net
    net.close()


def load(net: Network, commands: int) -> None:
    """A hundred a second."""
    for _ in range(commands):
        net.propose()
        net.run(0.01)


def test_a_follower_far_behind_catches_up(net):
    late = next(host for host in net.hosts.values() if host is not net.leader())
    net.cut = lambda source, target: late.node_id in (source, target)
    load(net, 300)
    net.cut = lambda _source, _target: False
    before = net.installs
    load(net, 600)
    assert net.leader().applied_index - late.applied_index < 50
    assert net.installs == before + 1
    load(net, 100)
    journal = net.leader().journal
    assert journal.last_index - journal.first_index < 150, "the log is as short as ever"


def test_a_new_controller_becomes_a_voter(net):
    load(net, 300)
    late = net.join()
    token = net.add(late.node_id, timeout_s=10)
    load(net, 900)
    assert net.changes[token] == "done"
    assert net.voters() == {1, 2, 3, 4}


# How long, and how much.


class Sending(Leader):
    """A leader that sends node 3 a snapshot, while commands come in and node 2 takes them."""

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self.settled()
        self.go_on(10)
        self.said = self.receive(3, reply(self.status.term, 2, success=False, reset=True, round_=1))
        self.sent_index = self.chunk().last_index

    def chunk(self):
        (chunk,) = (m.snapshot_chunk for to, m in self.said if m.HasField("snapshot_chunk"))
        return chunk

    def go_on(self, commands: int) -> None:
        """... and it takes a snapshot of its own."""
        for number in range(commands):
            self.propose(b"%d" % number)
            self.answer(2)
        self.voter.compact(self.status.applied_index, b"s" * 3 * transfer.CHUNK_BYTES)
        self.step()

    def take_chunks(self) -> None:
        """Node 3 takes the snapshot."""
        for _ in range(2):
            self.said = self.receive(
                3, reply(self.status.term, 0, success=False, round_=self.chunk().round)
            )
        done = reply(self.status.term, self.sent_index + 1, round_=self.chunk().round)
        self.said = self.receive(3, done)

    def pass_time_without_3(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 0.15, end_s)
            self.said = self.answer(2)

    @property
    def drops_all_it_may(self) -> bool:
        return self.journal.first_index == self.status.applied_index - 2


@pytest.fixture
def sending(tmp_path):
    leader = Sending(tmp_path)
    yield leader
    leader.journal.abandon()


def test_the_log_after_a_snapshot_is_kept_for_who_is_sent_it(sending):
    for _ in range(3):
        sending.go_on(10)
        assert sending.journal.first_index == sending.sent_index
    sending.take_chunks()
    (append,) = (
        message.append_entries
        for to, message in sending.said
        if to == 3 and message.HasField("append_entries")
    )
    assert append.previous_index == sending.sent_index
    assert len(append.entries) == 30


def test_it_is_kept_until_the_follower_is_little_behind(sending):
    sending.take_chunks()
    sending.go_on(10)
    assert sending.journal.first_index == sending.sent_index
    matched = sending.journal.last_index - 8
    sending.answer(3, matched)
    sending.go_on(4)
    assert sending.journal.first_index == matched
    sending.answer(3)
    sending.go_on(2)
    assert sending.drops_all_it_may
    sending.go_on(10)
    assert sending.drops_all_it_may, "it is a follower like any other now"


def test_nothing_is_kept_for_a_transfer_that_takes_too_long(sending, monkeypatch):
    monkeypatch.setattr(snapshotting, "HELD_S", 3.0)
    sending.pass_time_without_3(2.9)
    sending.go_on(10)
    assert sending.journal.first_index == sending.sent_index
    sending.pass_time_without_3(0.2)
    sending.go_on(10)
    assert sending.drops_all_it_may
    sending.take_chunks()
    assert sending.chunk().last_index > sending.sent_index, "it starts anew"


def test_who_had_all_that_was_committed_is_a_follower_like_any_other(sending):
    sending.take_chunks()
    sending.answer(3)
    sending.go_on(10)  # Node 3 takes no more.
    assert sending.drops_all_it_may


def test_a_log_that_grows_too_large_is_not_kept(sending, monkeypatch):
    monkeypatch.setattr(snapshotting, "HELD_BYTES", 5_000)
    sending.go_on(10)
    assert sending.journal.first_index == sending.sent_index
    sending.go_on(20)
    assert sending.drops_all_it_may


def test_nothing_is_kept_for_who_gets_nothing_any_more(sending):
    sending.remove(3)
    sending.answer(2)
    sending.go_on(10)
    assert sending.drops_all_it_may
