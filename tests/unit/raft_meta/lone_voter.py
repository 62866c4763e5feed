"""One voter whose peers are the test: what it is told, and what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import MachineState, Role
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voter import Voter
from penstock.raft_meta.voters import Member, VoterSet
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.raft_fuzz import TIMING, open_fast

Message = raft_pb2.RaftExchangeRequest
NO_OP = raft_pb2.RAFT_ENTRY_KIND_NO_OP
COMMAND = raft_pb2.RAFT_ENTRY_KIND_COMMAND


def entry(index: int, term: int, payload: bytes | None = None) -> raft_pb2.RaftEntry:
    text = b"%d.%d" % (index, term) if payload is None else payload
    return raft_pb2.RaftEntry(index=index, term=term, kind=COMMAND, payload=text)


def append(term, previous, *entries, commit=1, round_=1) -> Message:
    """``previous`` is (index, term)."""
    return Message(
        term=term,
        append_entries=raft_pb2.AppendEntries(
            previous_index=previous[0],
            previous_term=previous[1],
            commit_index=commit,
            round=round_,
            entries=entries,
        ),
    )


def reply(term, next_index, *, success=True, round_=1, reset=False) -> Message:
    return Message(
        term=term,
        append_entries_reply=raft_pb2.AppendEntriesReply(
            success=success, next_index=next_index, round=round_, reset=reset
        ),
    )


def request_vote(term, last=(1, 0)) -> Message:
    request = raft_pb2.RequestVote(last_log_index=last[0], last_log_term=last[1])
    return Message(term=term, request_vote=request)


def pre_vote(term, last=(1, 0)) -> Message:
    return Message(
        term=term - 1,
        pre_vote=raft_pb2.PreVote(
            candidate_term=term, last_log_index=last[0], last_log_term=last[1]
        ),
    )


class Lone:
    """Voter 1 of ``nodes``. Every call of ``tell`` is a step; ``said`` is what it answered."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        why_unreadable: Callable[[bytes], str] = lambda _snapshot: "",
    ) -> None:
        self.directory = directory
        self.nodes = nodes
        self.why_unreadable = why_unreadable
        self.now_s = 50.0
        self.events: list[object] = []
        self.supported_level = 3
        self.machine: MachineState | None = None  # How far its state machine is.
        self.open()

    def open(self, **named) -> None:
        named.setdefault("open_environment", open_fast)
        self.journal = LmdbJournal(
            self.directory / "journal", cluster_id="lone", node_id=1, **named
        )
        if self.journal.voters is None:
            self.found()
        self.voter = Voter(
            node_id=1,
            voters=range(1, self.nodes + 1),
            journal=self.journal,
            snapshots=SnapshotStore(self.directory),
            timing=TIMING,
            rng=random.Random(3),
            retained_entries=2,
            now_s=self.now_s,
            supported_level=self.supported_level,
            machine=lambda: self.machine,
            why_unreadable=self.why_unreadable,
        )

    def found(self) -> None:
        """As if an entry before the test's held the voters; the peers' directories may be any."""
        voters = VoterSet.of(range(1, self.nodes + 1))
        me = Member(1, "", 0, self.journal.directory_id)
        self.journal.found(voters.with_member(me), index=1)

    def crash(self) -> None:
        self.journal.abandon()
        self.open()

    def step(self) -> list[tuple[int, Message]]:
        events, messages = self.voter.step(self.now_s)
        self.events += events
        return messages

    def tell(self, peer: int, *messages: Message) -> list[tuple[int, Message]]:
        for message in messages:
            self.voter.receive(peer, message, self.now_s)
        return self.step()

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        self.now_s += seconds
        return self.step()

    def propose(self, payload: bytes, token: int = 1) -> list[tuple[int, Message]]:
        self.voter.propose(token, payload)
        return self.step()

    @property
    def status(self):
        return self.voter.status()

    @property
    def role(self) -> Role:
        return self.status.role

    @property
    def log(self) -> list[tuple[int, int]]:
        return [(each.log_index, each.term) for each in self.journal[:]]

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def stand(self) -> None:
        """Win the pre-vote."""
        self.wait(1.1)
        term = self.status.term + 1
        for peer in range(2, self.nodes + 1):
            answer = raft_pb2.PreVoteReply(candidate_term=term, granted=True)
            self.voter.receive(peer, Message(term=term - 1, pre_vote_reply=answer), self.now_s)
        self.step()
        assert self.role is Role.CANDIDATE

    def vote(self, peer: int) -> list[tuple[int, Message]]:
        return self.tell(peer, Message(term=self.status.term, vote=raft_pb2.Vote()))

    def lead(self) -> int:
        """Become the leader, and have every peer follow up to the no-op; the term."""
        self.stand()
        for peer in range(2, self.nodes + 1):
            self.vote(peer)
        assert self.role is Role.LEADER
        return self.status.term
