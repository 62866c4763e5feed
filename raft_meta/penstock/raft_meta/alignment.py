"""Snapshot and journal are two files, and a crash may lie between them."""

from __future__ import annotations

from penstock.raft_meta.damage import damaged
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore


def align(journal: LmdbJournal, snapshots: SnapshotStore) -> Snapshot | None:
    """Make the journal begin where the snapshot ends, or before; the snapshot.

    A journal without the snapshot's last entry is older than the snapshot or went another way;
    either way nothing in it beyond the snapshot was ever committed. Raises DataDirectoryError when
    something is missing between the two.
    """
    snapshots.remove_leftovers()
    snapshot = snapshots.load()
    if snapshot is None:
        if journal.first_index > 1:
            raise damaged(
                f"the Raft journal begins at {journal.first_index}, and the snapshot of what "
                "came before is gone"
            )
        return None
    if journal.term_at(snapshot.index) != snapshot.term:
        if journal.first_index > snapshot.index:
            raise damaged(
                f"the Raft journal begins at {journal.first_index}, but the snapshot ends at "
                f"{snapshot.index}"
            )
        journal.reset_to_snapshot(snapshot.index, snapshot.term, snapshot.voters)
    elif journal.commit_index < snapshot.index:
        journal.setRaftCommitIndex(snapshot.index)
    return snapshot
