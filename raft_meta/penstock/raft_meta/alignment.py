"""Snapshot and journal are two files, and a crash may lie between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from penstock.raft_meta.damage import damaged
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import VoterSet


@dataclass(frozen=True, slots=True)
class LogView:
    """What a node's two files say together: where its log ends, and who votes by it."""

    last_index: int
    last_term: int
    voters: VoterSet | None


def align(journal: LmdbJournal, snapshots: SnapshotStore) -> Snapshot | None:
    """Make the journal begin where the snapshot ends, or before; the snapshot.

    Raises DataDirectoryError when something is missing between the two.
    """
    snapshots.remove_leftovers()
    snapshot = snapshots.load()
    if _replaces(snapshot, journal):
        journal.reset_to_snapshot(snapshot.index, snapshot.term, snapshot.voters)
    elif snapshot is not None and journal.commit_index < snapshot.index:
        journal.setRaftCommitIndex(snapshot.index)
    return snapshot


def look(journal: LmdbJournal, snapshots: SnapshotStore) -> LogView:
    """How the log would be if the two were aligned now; nothing is changed.

    Raises DataDirectoryError as ``align`` does.
    """
    snapshot = snapshots.load()
    if _replaces(snapshot, journal):
        return LogView(snapshot.index, snapshot.term, snapshot.voters or journal.voters)
    return LogView(journal.last_index, journal.last_term, journal.voters)


def _replaces(snapshot: Snapshot | None, journal: LmdbJournal) -> TypeGuard[Snapshot]:
    """Whether the snapshot takes the place of the whole journal.

    A journal without the snapshot's last entry is older than the snapshot or went another way;
    either way nothing in it beyond the snapshot was ever committed.
    """
    if snapshot is None:
        if journal.first_index > 1:
            raise damaged(
                f"the Raft journal begins at {journal.first_index}, and the snapshot of what "
                "came before is gone"
            )
        return False
    if journal.term_at(snapshot.index) == snapshot.term:
        return False
    if journal.first_index > snapshot.index:
        raise damaged(
            f"the Raft journal begins at {journal.first_index}, but the snapshot ends at "
            f"{snapshot.index}"
        )
    return True
