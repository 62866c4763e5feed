"""What the guard relies on in pysyncobj 0.3.17, pinned: another version must be audited anew."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import pysyncobj.pickle
import pysyncobj.serializer
import pysyncobj.syncobj
import pytest

from penstock.raft_meta.engine import SUCCESS, MetadataRaft
from penstock.raft_meta.journal import COMMAND, NO_OP, LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import Role
from tests.unit.raft_meta.raft_fuzz import TIMING, open_fast

PRIVATE = [
    "raftState",
    "raftLeader",
    "raftElectionDeadline",
    "newAppendEntriesTime",
    "raftNextIndex",
    "raftMatchIndex",
    "commandsWaitingCommit",
    "raftLastApplied",
    "raftCommitIndex",
]


class Bare:
    """The engine without its guard."""

    def __init__(self, directory, peers=(2, 3)) -> None:
        self.journal = LmdbJournal(
            directory / "journal", cluster_id="c", node_id=1, open_environment=open_fast
        )
        self.sent: list[tuple[int, dict]] = []
        self.roles: list[Role] = []
        self.now_s = 10.0
        self.raft = MetadataRaft(
            node_id=1,
            journal=self.journal,
            timing=TIMING,
            send=lambda peer, message: self.sent.append((peer, message)),
            role_changed=self.roles.append,
            install=lambda _snapshot: None,
            now_s=self.now_s,
        )
        self.raft.set_voters(peers, is_voter=True)

    def tick(self, seconds=0.0) -> list[tuple[int, dict]]:
        self.now_s += seconds
        self.raft.at(self.now_s)
        self.sent.clear()
        self.raft.tick()
        return list(self.sent)

    def elect(self) -> None:
        self.stand()
        self.vote(2)
        assert self.raft.role() is Role.LEADER

    def stand(self) -> list[tuple[int, dict]]:
        for peer in (2, 3):
            self.raft.connect(peer)
        self.raft.stand()
        return self.tick()

    def vote(self, peer: int) -> None:
        self.raft.deliver(peer, {"type": "response_vote", "term": self.raft.term()})


@pytest.fixture
def bare(tmp_path):
    bare = Bare(tmp_path)
    yield bare
    bare.journal.abandon()


def entries_sent(sent):
    return [
        (peer, [entry[0] for entry in message["entries"]])
        for peer, message in sent
        if message["type"] == "append_entries" and message["entries"]
    ]


def append_entries(term, entries, previous, commit=1):
    return {
        "type": "append_entries",
        "term": term,
        "commit_index": commit,
        "entries": entries,
        "prevLogIdx": previous[0],
        "prevLogTerm": previous[1],
    }


def test_the_version_is_the_audited_one():
    assert importlib.metadata.version("pysyncobj") == "0.3.17"


def test_the_private_names_in_use_exist(bare):
    missing = [name for name in PRIVATE if not hasattr(bare.raft, f"_SyncObj__{name}")]
    assert missing == []


CHANGED_BY_THE_IMPORT = """
import json, os, pickle, random, select, socket, ssl, struct, sys, threading, time, zlib
own = [name for name in sys.modules if name in sys.stdlib_module_names and name[0] != "_"]
before = {name: dict(vars(sys.modules[name])) for name in own}
import penstock.raft_meta.engine
for name, attributes in before.items():
    for attribute, value in attributes.items():
        if vars(sys.modules[name]).get(attribute) is not value:
            print(f"{name}.{attribute}")
"""


def test_the_import_changes_no_module_of_the_standard_library():
    changed = subprocess.run(
        [sys.executable, "-c", CHANGED_BY_THE_IMPORT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert changed.split() == []


def test_nothing_pickles():
    for module in (pysyncobj.syncobj, pysyncobj.serializer):
        with pytest.raises(RaftSafetyError, match="pickle"):
            module.pickle.loads(b"")
    with pytest.raises(RaftSafetyError, match="pickle"):
        pysyncobj.pickle.loads(b"")


def test_the_journal_is_taken_as_it_is_given(bare):
    """S:166-168."""
    assert bare.raft._SyncObj__raftLog is bare.journal
    assert bare.journal[:] == [(NO_OP, 1, 0)]


def test_nobody_stands_without_a_connected_peer(bare):
    """S:635, the gate that PreVote closes."""
    bare.raft.stand()
    bare.tick(100)
    assert bare.raft.role() is Role.FOLLOWER
    bare.raft.connect(2)
    sent = bare.tick()
    assert bare.raft.role() is Role.CANDIDATE
    assert {message["type"] for _, message in sent} == {"request_vote"}


def test_a_vote_request_with_an_impossible_log_raises_the_term_and_gets_no_vote(bare):
    """S:918-933, how rule 1 makes the engine step down."""
    bare.elect()
    bare.sent.clear()
    bare.raft.deliver(
        2, {"type": "request_vote", "term": 9, "last_log_index": 0, "last_log_term": -1}
    )
    assert (bare.raft.role(), bare.raft.term(), bare.sent) == (Role.FOLLOWER, 9, [])
    assert bare.journal.getVotedForNodeId() is None


def test_append_entries_without_a_previous_entry_only_tells_leader_and_commit(bare):
    """S:945-962 and 1021-1035, how the guard lets a leader be followed without any append."""
    entries = [(COMMAND + b"a", 2, 1), (COMMAND + b"b", 3, 1)]
    bare.raft.deliver(2, append_entries(1, entries, (1, 0)))
    bare.sent.clear()
    bare.raft.deliver(3, {"type": "append_entries", "term": 4, "commit_index": 2})
    assert (bare.raft.term(), bare.raft.leader_id()) == (4, 3)
    assert (bare.journal.last_index, bare.journal.commit_index) == (3, 2)
    assert bare.sent == []


def test_commands_are_counted_and_never_run(bare):
    """S:892: a type that the engine does not know is nothing to apply."""
    payload = b"c__builtin__\nexit\n."  # A pickle that would end the process.
    bare.raft.deliver(2, append_entries(1, [(COMMAND + payload, 2, 1)], (1, 0), commit=2))
    bare.tick()
    assert bare.raft.applied_index() == 2


def test_an_outcome_is_told_just_before_its_entry_counts_as_applied(bare):
    """S:719-725, how an outcome finds its index."""
    bare.elect()
    outcomes = []
    for name in "ab":
        bare.raft.submit(
            name.encode(),
            lambda _result, reason, name=name: outcomes.append(
                (name, reason, bare.raft.applied_index() + 1)
            ),
        )
    bare.tick()
    bare.raft.acknowledge(2, 4)
    bare.tick()
    assert outcomes == [("a", SUCCESS, 3), ("b", SUCCESS, 4)]
    assert [bare.journal[i].command for i in (2, 3)] == [COMMAND + b"a", COMMAND + b"b"]


def test_a_peer_that_is_far_behind_is_told_by_an_empty_snapshot_message(bare):
    """S:1309-1331: once, if sending it disconnects the peer."""
    bare.elect()
    bare.raft.acknowledge(2, 2)
    bare.tick()
    bare.journal.compact_to(2)
    bare.raft.send_from(3, 2)
    bare.raft._bridge._send = lambda peer, message: (
        bare.sent.append((peer, message)),
        bare.raft.disconnect(peer) if "serialized" in message else None,
    )
    bare.raft.hurry()
    sent = [message for peer, message in bare.tick() if peer == 3]
    assert [message["serialized"] for message in sent] == [None]


def test_role_changes_are_told_before_the_engine_acts_in_the_role(bare):
    bare.elect()
    assert bare.roles == [Role.CANDIDATE, Role.LEADER]


def test_the_engine_has_no_file_descriptors_of_its_own(bare):
    assert not hasattr(bare.raft, "_SyncObj__pipeNotifier")


def test_only_one_module_imports_the_engine():
    import penstock.raft_meta.guard
    import penstock.raft_meta.journal
    import penstock.raft_meta.voter

    for module in (
        penstock.raft_meta.guard,
        penstock.raft_meta.journal,
        penstock.raft_meta.voter,
    ):
        assert "import pysyncobj" not in inspect.getsource(module)


def test_commands_that_wait_together_are_sent_together(bare):
    """S:540 would send once for each command, to every peer."""
    bare.elect()
    for payload in (b"a", b"b", b"c"):
        bare.raft.submit(payload, lambda _result, _reason: None)
    together = [COMMAND + b"a", COMMAND + b"b", COMMAND + b"c"]
    assert sorted(entries_sent(bare.tick())) == [(2, together), (3, together)]
    assert entries_sent(bare.tick()) == []


def test_a_follower_with_commands_sends_no_entries(bare):
    outcomes = []
    bare.raft.connect(2)
    bare.raft.submit(b"a", lambda _result, reason: outcomes.append(reason))
    assert entries_sent(bare.tick()) == []
    assert outcomes != [SUCCESS]


# Who votes: the engine's "other nodes" count, its "readonly nodes" do not.


FAST_S = TIMING.election_min_s  # A leader that no majority answered for so long is none.


def addressed(sent, kind="append_entries"):
    return sorted({peer for peer, message in sent if message["type"] == kind})


def test_a_readonly_node_is_sent_the_log_and_counts_for_nothing(bare):
    """S:1113, S:1258 and S:661: an observer."""
    bare.elect()
    bare.raft.acknowledge(2, 2)
    bare.tick()
    bare.raft.observe(4)
    bare.raft.submit(b"a", lambda _result, _reason: None)
    assert addressed(bare.tick()) == [2, 3, 4]
    bare.raft.acknowledge(4, 3)
    bare.tick()
    assert (bare.raft.match_index()[4], bare.journal.commit_index) == (3, 2)


def test_a_readonly_node_begins_at_the_end_of_the_log(bare):
    """S:1116: whoever is behind says so, and is then sent the rest."""
    bare.elect()
    bare.raft.submit(b"a", lambda _result, _reason: None)
    bare.tick()
    bare.raft.observe(4)
    bare.raft.hurry()
    ((message, entries),) = [
        (each["prevLogIdx"], each["entries"]) for peer, each in bare.tick() if peer == 4
    ]
    assert (message, entries) == (3, [])
    bare.raft.send_from(4, 2)
    bare.raft.hurry()
    assert (4, [b"\x01", COMMAND + b"a"]) in entries_sent(bare.tick())


def test_a_readonly_node_keeps_no_leader(bare):
    """S:681: check quorum asks the voters."""
    bare.elect()
    bare.raft.observe(4)
    bare.tick(FAST_S * 0.9)
    bare.raft.saw(4)
    bare.tick(FAST_S * 0.2)
    assert bare.raft.role() is Role.FOLLOWER


def test_a_voter_that_answers_keeps_a_leader(bare):
    """S:681, the other way."""
    bare.elect()
    bare.tick(FAST_S * 0.9)
    bare.raft.saw(3)
    bare.tick(FAST_S * 0.2)
    assert bare.raft.role() is Role.LEADER


def test_no_readonly_node_is_asked_for_its_vote(bare):
    """S:642."""
    bare.raft.observe(4)
    assert addressed(bare.stand(), "request_vote") == [2, 3]


def test_a_readonly_node_that_goes_is_sent_nothing(bare):
    bare.elect()
    bare.raft.observe(4)
    bare.raft.stop_observing(4)
    bare.raft.hurry()
    assert addressed(bare.tick()) == [2, 3]
    assert set(bare.raft.match_index()) == {2, 3}


@pytest.mark.parametrize(("peers", "needed"), [((2,), 1), ((2, 3), 1), ((2, 3, 4, 5), 2)])
def test_votes_are_counted_over_the_voters_of_the_moment(bare, peers, needed):
    """S:1067: votes of others, beside its own."""
    bare.raft.set_voters(peers, is_voter=True)
    bare.stand()
    for peer in peers[: needed - 1]:
        bare.vote(peer)
    assert bare.raft.role() is Role.CANDIDATE
    bare.vote(peers[needed - 1])
    assert bare.raft.role() is Role.LEADER


def test_the_only_voter_elects_itself(bare):
    """S:650 and S:1340: with nobody to connect to the gate is open."""
    bare.raft.set_voters((), is_voter=True)
    bare.raft.stand()
    bare.tick()
    assert bare.raft.role() is Role.LEADER
    bare.tick()
    assert bare.journal.commit_index == 2


def test_entries_are_counted_over_the_voters_of_the_moment(bare):
    """S:661: the set that is in force when it counts decides, for entries of before it too."""
    bare.elect()
    bare.raft.set_voters((2, 3, 4, 5), is_voter=True)
    bare.raft.acknowledge(2, 2)
    bare.tick()
    assert bare.journal.commit_index == 1
    bare.raft.set_voters((2,), is_voter=True)
    bare.tick()
    assert bare.journal.commit_index == 2


def test_an_observer_that_becomes_a_voter_counts_with_what_it_has(bare):
    bare.elect()
    bare.raft.set_voters((2,), is_voter=True)
    bare.raft.observe(4)
    bare.raft.acknowledge(4, 2)
    bare.raft.set_voters((2, 4), is_voter=True)
    bare.tick()
    assert bare.journal.commit_index == 2
    bare.raft.submit(b"a", lambda _result, _reason: None)
    assert addressed(bare.tick()) == [2, 4]


def test_a_voter_that_is_none_any_more_counts_for_nothing_and_is_sent_nothing(bare):
    bare.elect()
    bare.raft.acknowledge(3, 2)
    bare.raft.set_voters((2,), is_voter=True)
    bare.raft.hurry()
    assert addressed(bare.tick()) == [2]
    assert bare.journal.commit_index == 1


def test_a_new_voter_is_not_taken_for_one_that_is_silent(bare):
    """S:681 would find no time of its last answer, and S:1258 no next index."""
    bare.elect()
    bare.tick(FAST_S * 0.9)
    bare.raft.saw(2)
    bare.raft.set_voters((2, 3, 4, 5), is_voter=True)
    bare.tick(FAST_S * 0.2)
    assert bare.raft.role() is Role.LEADER


@pytest.mark.parametrize("peers", [(), (2,), (2, 3)])
def test_who_is_no_voter_never_stands(bare, peers):
    """S:635: somebody who is never connected stands in for a peer."""
    bare.raft.set_voters(peers, is_voter=False)
    for _ in range(3):
        bare.raft.stand()
        assert bare.tick(100) == []
    assert (bare.raft.role(), bare.raft.term()) == (Role.FOLLOWER, 0)


def test_a_new_leader_knows_nothing_of_anybody(bare):
    """S:1219-1223: neither of voters nor of readonly nodes of an earlier term."""
    bare.elect()
    bare.raft.observe(4)
    for peer in (2, 3, 4):
        bare.raft.acknowledge(peer, 2)
    bare.raft.deliver(
        3, {"type": "request_vote", "term": 8, "last_log_index": 0, "last_log_term": -1}
    )
    bare.elect()
    assert bare.raft.match_index() == {2: 0, 3: 0, 4: 0}
