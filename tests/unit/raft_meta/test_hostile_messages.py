"""No message, however absurd, from a peer that is who it says ends a voter or its promises."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.raft_meta.guard import MAX_TERM_STEP
from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.voter import Installed
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.lone_voter import Lone, Message, append, entry, reply

INT64 = st.one_of(
    st.integers(-2, 12),
    st.sampled_from([2**31, 2**62, 2**63 - 2, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
)
SMALL = st.integers(-1, 9)
INDEX = st.one_of(SMALL, SMALL, INT64)
TERM = st.one_of(st.integers(0, 4), st.integers(0, 4), INT64)

ENTRIES = st.lists(
    st.builds(
        raft_pb2.RaftEntry,
        index=INDEX,
        term=TERM,
        kind=st.integers(-1, 4),
        payload=st.binary(max_size=20),
    ),
    max_size=4,
)
BODIES = st.one_of(
    st.builds(
        lambda **body: {"append_entries": raft_pb2.AppendEntries(**body)},
        previous_index=INDEX,
        previous_term=TERM,
        commit_index=INDEX,
        round=INT64,
        entries=ENTRIES,
    ),
    st.builds(
        lambda **body: {"append_entries_reply": raft_pb2.AppendEntriesReply(**body)},
        success=st.booleans(),
        next_index=INDEX,
        round=INDEX,
        reset=st.booleans(),
    ),
    st.builds(
        lambda **body: {"snapshot_chunk": raft_pb2.SnapshotChunk(**body)},
        last_index=INDEX,
        last_term=TERM,
        offset_bytes=INDEX,
        total_bytes=INDEX,
        crc32c=st.integers(0, 2**32 - 1),
        commit_index=INDEX,
        round=INT64,
        data=st.binary(max_size=12),
    ),
    st.builds(
        lambda **body: {"request_vote": raft_pb2.RequestVote(**body)},
        last_log_index=INDEX,
        last_log_term=TERM,
    ),
    st.builds(
        lambda **body: {"pre_vote": raft_pb2.PreVote(**body)},
        candidate_term=TERM,
        last_log_index=INDEX,
        last_log_term=TERM,
    ),
    st.builds(
        lambda **body: {"pre_vote_reply": raft_pb2.PreVoteReply(**body)},
        candidate_term=TERM,
        granted=st.booleans(),
    ),
    st.just({"vote": raft_pb2.Vote()}),
    st.just({"term_notice": raft_pb2.TermNotice()}),
    st.just({"timeout_now": raft_pb2.TimeoutNow()}),
    st.just({"hello": raft_pb2.RaftHello(node_id=3)}),
    st.just({}),
)
MESSAGES = st.builds(lambda term, body: Message(term=term, **body), TERM, BODIES)
SENT = st.lists(st.tuples(st.integers(-1, 4), MESSAGES), max_size=12)


BROKEN_PROMISES = re.compile(
    r"node \d+ claims to lead term \d+, which \d+ leads"
    r"|the leader's entry \d+ differs from the one committed here"
)
"""What proves that a voter has broken its word, or lost its disk: the one reason to stop."""
VOTERS = (2, 3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SENT, st.booleans())
@example([(2, Message(term=2**63 - 1, term_notice=raft_pb2.TermNotice()))], False)
@example([(3, append(1, (1, 0)))], False)
@example([(2, append(1, (1, 0)))], True)
@example([(2, append(3, (1, 0), entry(2, 3, b"other"), commit=2))], False)
@example([(4, append(3, (1, 0), entry(2, 3, b"other"), commit=2))], False)
@example([(4, append(3, (2, 3), entry(3, 3, b"other"), commit=2))], False)
@example([(2, reply(1, 2**63 - 1, round_=1))], True)
def test_nothing_that_a_peer_can_say_undoes_what_was_promised(
    sent: list[tuple[int, Message]], leads: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        lone = Lone(Path(directory))
        if leads:
            lone.lead()
        else:
            lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), commit=2))
        term, commit = lone.status.term, lone.journal.commit_index
        committed = [(index, lone.journal.term_at(index)) for index in range(1, commit + 1)]
        peer = 0
        try:
            for peer, message in sent:
                # As the link does: over the wire.
                lone.tell(peer, Message.FromString(message.SerializeToString()))
            lone.wait(2.0)
            lone.wait(2.0)
        except RaftSafetyError as error:
            # Who is no voter has promised nothing: its word is to be refused.
            if not BROKEN_PROMISES.fullmatch(str(error)) or peer not in VOTERS:
                raise
        lone.crash()
        assert lone.status.term >= term
        for index, in_term in committed:
            if index >= lone.journal.first_index:
                assert lone.journal.term_at(index) == in_term
        lone.journal.abandon()


@pytest.mark.parametrize(
    "contradiction",
    [append(1, (1, 0), entry(2, 0, b"other"), commit=2), append(1, (2, 0), entry(3, 1), commit=2)],
    ids=["an entry", "what is before one"],
)
def test_only_a_voter_ends_a_voter_by_contradicting_what_is_committed(
    tmp_path: Path, contradiction: Message
) -> None:
    lone = Lone(tmp_path)
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), commit=2))
    contradiction.term = 2
    assert lone.tell(4, contradiction) == [], "it is not answered"
    assert lone.log == [(1, 0), (2, 1), (3, 1)]
    with pytest.raises(RaftSafetyError, match="the leader's entry 2 differs"):
        lone.tell(2, contradiction)


NONSENSE = [b"", b"\xff\xff", b"x" * 100]


def nonsense(data: bytes) -> Message:
    snapshot = Snapshot(20, 2, data)
    chunk = raft_pb2.SnapshotChunk(
        last_index=20, last_term=2, total_bytes=len(data), crc32c=snapshot.crc, data=data, round=1
    )
    return Message(term=2, snapshot_chunk=chunk)


@pytest.mark.parametrize("data", NONSENSE)
def test_a_snapshot_of_nonsense_is_taken_of_a_voter_alone(tmp_path: Path, data: bytes) -> None:
    # A voter's ends the controller, which cannot read it: of that a stranger must not be capable.
    lone = Lone(tmp_path, why_unreadable=lambda _snapshot: "it is nonsense")
    assert lone.tell(4, nonsense(data)) == [], "it is not answered"
    assert not lone.of(Installed)
    assert not (tmp_path / "snapshot").exists()
    lone.tell(2, nonsense(data))
    assert [event.snapshot.data for event in lone.of(Installed)] == [data]


def test_a_sound_snapshot_is_taken_of_whoever_leads(tmp_path: Path) -> None:
    # A voter that was away for long may not know yet that the leader is a voter.
    lone = Lone(tmp_path)
    lone.tell(4, nonsense(b"sound"))
    assert [event.snapshot.data for event in lone.of(Installed)] == [b"sound"]


def test_a_voter_leads_a_term_that_a_stranger_claimed_first(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.tell(4, append(1, (1, 0), entry(2, 1)))
    assert lone.status.leader_id == 4
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), commit=3))
    assert lone.status.leader_id == 2
    assert lone.log == [(1, 0), (2, 1), (3, 1)]
    assert lone.tell(4, append(1, (3, 1), entry(4, 1))) == []
    with pytest.raises(RaftSafetyError, match="node 3 claims to lead term 1, which 2 leads"):
        lone.tell(3, append(1, (3, 1)))


def test_a_term_that_is_none_is_not_entered(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    notice = raft_pb2.TermNotice()
    term = lone.status.term
    for absurd in (term + MAX_TERM_STEP + 1, 2**63 - 1, -1):
        lone.tell(2, Message(term=absurd, term_notice=notice))
        assert lone.status.term == term
    lone.tell(2, Message(term=term + MAX_TERM_STEP, term_notice=notice))
    assert lone.status.term == term + MAX_TERM_STEP
