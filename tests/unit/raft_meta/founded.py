"""Journals that begin after the founding of their cluster."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.raft_meta.journal import FIRST_INDEX, LmdbJournal
from penstock.raft_meta.voters import DIRECTORY_ID_BYTES, Member, VoterSet


def directory_of(node_id: int) -> bytes:
    """The id of a node's first directory."""
    return node_id.to_bytes(DIRECTORY_ID_BYTES, "big")


def voter_set(node_ids: Iterable[int]) -> VoterSet:
    return VoterSet(tuple(Member(n, f"host-{n}", 1, directory_of(n)) for n in node_ids))


def found(journal: LmdbJournal, node_ids: Iterable[int]) -> None:
    """As if the entry before the test's held the voters; nothing where voters are known."""
    if journal.voters is None:
        journal.found(voter_set(node_ids), index=FIRST_INDEX)
