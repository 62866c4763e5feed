"""Rule 8, ReadIndex (Raft thesis 6.4): linearizable reads that write nothing to the log."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.raft_meta.rules.desk import Desk


@dataclass(frozen=True, slots=True)
class _Read:
    token: int
    index: int  # The commit index when it began.
    rounds: dict[int, int]  # The rounds sent before it began, by peer.


class Reading:
    """A read waits until a majority echoed a round that began after it did."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._reads: list[_Read] = []

    def begin(self, token: int) -> bool:
        """Begin a read; False when this node does not lead. See ``ready``."""
        desk = self._desk
        if not desk.leads:
            return False
        rounds = {peer: desk.progress(peer).round for peer in desk.peers}
        self._reads.append(_Read(token, desk.journal.commit_index, rounds))
        desk.engine.hurry()
        return True

    def ready(self) -> list[tuple[int, int]]:
        """Reads whose leader was confirmed after they began: their token, and their index.

        A leader knows what is committed only once an entry of its own term is.
        """
        desk = self._desk
        if not self._reads or not desk.leads:
            return []
        commit = desk.journal.commit_index
        if self._is_older_term(commit):
            return []
        ready: list[tuple[int, int]] = []
        waiting: list[_Read] = []
        for read in self._reads:
            if self._is_confirmed(read):
                index = commit if self._is_older_term(read.index) else read.index
                ready.append((read.token, index))
            else:
                waiting.append(read)
        self._reads = waiting
        return ready

    def _is_confirmed(self, read: _Read) -> bool:
        desk = self._desk
        echoes = sum(desk.progress(peer).echoed > read.rounds.get(peer, 0) for peer in desk.peers)
        return echoes + 1 >= desk.majority

    def _is_older_term(self, index: int) -> bool:
        return self._desk.journal.term_at(index) != self._desk.engine.term()

    def abandon(self) -> list[int]:
        """The tokens of all reads under way, which end here."""
        tokens = [read.token for read in self._reads]
        self._reads.clear()
        return tokens
