"""What a follower makes of AppendEntries: Figure 2 of the Raft paper, as a pure function.

The engine cuts its log after the previous entry whatever a message holds, so that a message that
was delivered twice, or late, undoes what came after it. It is therefore given only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.raft_meta.journal import (
    COMMAND,
    FIRST_INDEX,
    NO_OP,
    VOTERS,
    JournalEntry,
    LmdbJournal,
    RaftSafetyError,
)
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a message, and what of it the engine must append after what it must cut."""

    success: bool
    next_index: int
    commit_index: int = 0
    fresh: list[JournalEntry] = field(default_factory=list)


def decode_entries(
    append: raft_pb2.AppendEntries, term: int, max_command_bytes: int
) -> list[JournalEntry] | None:
    """The message's entries, or None when it is malformed and must be dropped.

    Only no-ops, commands and voter sets are let through: the engine has other kinds, which
    unpickle.
    """
    if append.previous_index < FIRST_INDEX or not 0 <= append.previous_term <= term:
        return None
    entries: list[JournalEntry] = []
    index, floor = append.previous_index, append.previous_term
    for entry in append.entries:
        index += 1
        if entry.index != index or not floor <= entry.term <= term:
            return None
        floor = entry.term
        if entry.kind == raft_pb2.RAFT_ENTRY_KIND_NO_OP and not entry.payload:
            command = NO_OP
        elif (
            entry.kind == raft_pb2.RAFT_ENTRY_KIND_COMMAND
            and len(entry.payload) <= max_command_bytes
        ):
            command = COMMAND + entry.payload
        elif entry.kind == raft_pb2.RAFT_ENTRY_KIND_VOTERS and _is_voter_set(entry.payload):
            command = VOTERS + entry.payload
        else:
            return None
        entries.append(JournalEntry(command, entry.index, entry.term))
    return entries


def _is_voter_set(payload: bytes) -> bool:
    try:
        VoterSet.decode(payload)
    except ValueError:
        return False
    return True


_KINDS: Final = {
    NO_OP: raft_pb2.RAFT_ENTRY_KIND_NO_OP,
    COMMAND: raft_pb2.RAFT_ENTRY_KIND_COMMAND,
    VOTERS: raft_pb2.RAFT_ENTRY_KIND_VOTERS,
}


def encode_entries(entries: Sequence[tuple[bytes, int, int]]) -> list[raft_pb2.RaftEntry]:
    """The engine's entries as they cross the network."""
    return [
        raft_pb2.RaftEntry(index=index, term=term, kind=_KINDS[command[:1]], payload=command[1:])
        for command, index, term in entries
    ]


def decide(
    journal: LmdbJournal, append: raft_pb2.AppendEntries, entries: list[JournalEntry]
) -> Decision:
    """What to do with a well-formed message of the current leader.

    ``next_index`` of a refusal is where the leader should go on: it goes back a whole term of
    this log at a time, and never to what is committed.
    """
    previous = append.previous_index
    matched = previous + len(entries)
    if previous > journal.last_index:
        return Decision(success=False, next_index=journal.last_index + 1)
    if previous < journal.first_index:
        # A snapshot covers the beginning, so it is committed, so it is the same.
        entries = entries[journal.first_index - previous - 1 :]
    elif journal.term_at(previous) != append.previous_term:
        return Decision(success=False, next_index=_start_of_term(journal, previous))
    agreeing = 0
    for entry in entries:
        if journal.term_at(entry.log_index) != entry.term:
            break
        agreeing += 1
    fresh = entries[agreeing:]
    if fresh and fresh[0].log_index <= journal.commit_index:
        raise RaftSafetyError(
            f"the leader's entry {fresh[0].log_index} differs from the one committed here"
        )
    return Decision(
        success=True,
        next_index=matched + 1,
        # What follows the matched entries may be another leader's leftover.
        commit_index=min(append.commit_index, matched),
        fresh=fresh,
    )


def _start_of_term(journal: LmdbJournal, index: int) -> int:
    if index <= journal.commit_index:
        raise RaftSafetyError(f"the leader's entry {index} differs from the one committed here")
    term = journal.term_at(index)
    while index - 1 > journal.commit_index and journal.term_at(index - 1) == term:
        index -= 1
    return index
