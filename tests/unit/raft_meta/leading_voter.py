"""A leader whose followers are the test, each with a directory of its own."""

from __future__ import annotations

from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.changing import Refusal
from penstock.raft_meta.voter import ChangeRefused
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.founded import directory_of, voter_set
from tests.unit.raft_meta.lone_voter import Lone, Message, reply


class Leader(Lone):
    """Node 1, which leads nodes that have directories; ``answer`` is a node's acknowledgement."""

    def __init__(self, directory, nodes: int = 3) -> None:
        super().__init__(directory, nodes)
        self.tokens = 0

    def open(self, **named) -> None:
        named.setdefault("new_directory_id", lambda: directory_of(1))
        super().open(**named)

    def found(self) -> None:
        self.journal.found(voter_set(range(1, self.nodes + 1)), index=1)

    def receive(self, peer: int, message: Message, directory=None):
        message.directory_id = directory_of(peer) if directory is None else directory
        return self.tell(peer, message)

    def answer(self, peer: int, index: int | None = None, directory=None):
        index = self.journal.last_index if index is None else index
        first = self.voter._guard._desk.progress(peer).began + 1
        return self.receive(peer, reply(self.status.term, index + 1, round_=first), directory)

    def answer_all(self) -> None:
        """Every other voter acknowledges the whole log."""
        for peer in range(2, self.nodes + 1):
            self.answer(peer)

    def pass_time(self, seconds: float) -> None:
        """Every other voter goes on answering."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 0.15, end_s)
            self.answer_all()

    def stand(self) -> None:
        self.wait(1.1)
        term = self.status.term + 1
        granted = raft_pb2.PreVoteReply(candidate_term=term, granted=True)
        for peer in range(2, self.nodes + 1):
            self.receive(peer, Message(term=term - 1, pre_vote_reply=granted))
        assert self.role is Role.CANDIDATE

    def vote(self, peer: int, directory=None):
        return self.receive(peer, Message(term=self.status.term, vote=raft_pb2.Vote()), directory)

    def settled(self) -> int:
        """Lead, with the no-op committed and everybody alive; the term."""
        term = self.lead()
        self.answer_all()
        assert self.status.commit_index == self.journal.last_index
        return term

    def add(self, node_id: int, timeout_s: float = 5.0) -> int:
        self.tokens += 1
        address = (f"host-{node_id}", 1)
        self.voter.add_voter(self.tokens, node_id, address, self.now_s, timeout_s=timeout_s)
        self.step()
        return self.tokens

    def remove(self, node_id: int) -> int:
        self.tokens += 1
        self.voter.remove_voter(self.tokens, node_id, self.now_s)
        self.step()
        return self.tokens

    def refusal(self, token: int) -> Refusal | None:
        return next((e.reason for e in self.of(ChangeRefused) if e.token == token), None)

    @property
    def ids(self) -> set[int]:
        return set(self.journal.voters.node_ids)
