"""What a controller says of a directory that it can't go on with."""

from __future__ import annotations

from penstock.wire.errors import DataDirectoryError


def damaged(what: str) -> DataDirectoryError:
    """The error for a damaged or incomplete metadata.dir: what is wrong, and what to do next.

    Starting empty is no way out of it: a voter promised never to forget its votes, nor the
    entries that it said it has (Raft, section 5.1: currentTerm, votedFor and log are persistent).
    """
    return DataDirectoryError(
        f"{what}. Do not start this controller with an empty directory instead: it would have "
        "forgotten its votes and what it had stored, and while another controller is down it could "
        "elect one that lacks committed metadata; next: put back a copy of metadata.dir that was "
        "made since this node last ran, or replace the controller: `penstock quorum remove ID`, "
        "start it with an empty metadata.dir, `penstock quorum add ID@HOST:PORT` "
        "(docs/operating/failures.md)"
    )
