"""The way out when a majority of the voters' directories is lost for good: one survivor goes on.

Everything else in Penstock keeps what was committed. This cannot: a majority may have decided what
no survivor has. So it is done by an operator, on a stopped node, who says that it is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.raft_meta.alignment import align, look
from penstock.raft_meta.directory_lock import locked
from penstock.raft_meta.journal import FIRST_INDEX, LmdbJournal
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voters import Address, Member, VoterSet
from penstock.wire.errors import DataDirectoryError


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of the voters. ``last_index`` and ``last_term`` tell survivors' logs apart."""

    node_id: int
    voters_before: tuple[int, ...]
    last_index: int
    last_term: int


def survey(directory: Path, *, cluster_id: str, node_id: int) -> Recovery:
    """How far a stopped controller's log goes, and who votes by it. Changes nothing.

    A snapshot that the journal lacks counts, as it would when the node starts: it died while it
    installed that one. Raises DataDirectoryError for a directory that is in use, damaged, another
    node's or empty.
    """
    with locked(directory):
        journal = _open(directory, cluster_id, node_id)
        try:
            return _describe(journal, SnapshotStore(directory), node_id)
        finally:
            journal.abandon()


def become_the_only_voter(
    directory: Path,
    *,
    cluster_id: str,
    node_id: int,
    addresses: Mapping[int, Address],
) -> Recovery:
    """Make a stopped controller the only voter, with the whole log that it has.

    What of it was not committed will be. Raises DataDirectoryError as survey does.
    """
    with locked(directory):
        journal = _open(directory, cluster_id, node_id)
        try:
            snapshots = SnapshotStore(directory)
            before = _describe(journal, snapshots, node_id)
            align(journal, snapshots)
            known = None if journal.voters is None else journal.voters.get(node_id)
            address = known.address if known is not None else addresses.get(node_id, ("", 0))
            me = Member(node_id, *address, journal.directory_id)
            journal.take_over(VoterSet((me,), recovered=True))
            return before
        finally:
            journal.abandon()


def _open(directory: Path, cluster_id: str, node_id: int) -> LmdbJournal:
    if not (directory / "journal").exists():
        raise DataDirectoryError(
            f"{directory} holds no metadata log, so that nothing can go on from it; next: run this "
            "on a controller that still has its directory"
        )
    return LmdbJournal(directory / "journal", cluster_id=cluster_id, node_id=node_id)


def _describe(journal: LmdbJournal, snapshots: SnapshotStore, node_id: int) -> Recovery:
    log = look(journal, snapshots)
    if not log.last_index or (journal.is_fresh and log.last_index <= FIRST_INDEX):
        raise DataDirectoryError(
            f"controller {node_id} has an empty metadata log, and all metadata would be lost; "
            "next: run this on a controller that still has its directory"
        )
    voters = () if log.voters is None else tuple(sorted(log.voters.node_ids))
    return Recovery(node_id, voters, log.last_index, log.last_term)
