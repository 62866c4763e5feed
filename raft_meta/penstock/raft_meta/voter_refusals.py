"""What an operator is told when the voter set is not changed."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.rules.changing import MOST_VOTERS, ChangeRefused, Refusal
from penstock.raft_meta.voters import Address
from penstock.wire.errors import (
    DuplicateVoterError,
    InvalidRequestError,
    LastVoterError,
    NetworkError,
    NotEnoughVotersError,
    PenstockError,
    UnknownVoterError,
    UnsupportedMetadataVersionError,
    VoterChangeInProgressError,
    VoterNotCaughtUpError,
)
from penstock.wire.transport import format_address


def change_refused(
    refused: ChangeRefused, node_id: int, status: QuorumStatus, *, failure: str = ""
) -> PenstockError:
    """The error for a change of ``node_id`` that did not happen. Nothing was changed.

    ``failure`` is why there was no stream to it the last time, if that is known.
    """
    voters = "none" if status.voters is None else str(sorted(status.voters.node_ids))
    match refused.reason:
        case Refusal.IN_PROGRESS:
            return VoterChangeInProgressError(
                "another change of the voters is under way, or this controller leads since a "
                "moment ago; next: ask again soon (penstock quorum status shows the voters)"
            )
        case Refusal.DUPLICATE:
            return DuplicateVoterError(
                f"controller {node_id} is a voter with another directory than the one it answers "
                f"out of now, whose votes are forgotten; next: penstock quorum remove {node_id}, "
                "then add it again"
            )
        case Refusal.UNKNOWN:
            return UnknownVoterError(
                f"controller {node_id} is no voter; the voters are {voters}; next: penstock quorum "
                "status"
            )
        case Refusal.LAST:
            return LastVoterError(
                f"controller {node_id} is the only voter; next: penstock quorum add another one "
                "first"
            )
        case Refusal.TOO_MANY:
            return InvalidRequestError(
                f"the voters are {voters}, and more than {MOST_VOTERS} make every change dearer "
                "and no cluster safer; next: penstock quorum remove one first"
            )
        case Refusal.NOT_CAUGHT_UP:
            why = _not_caught_up(refused.behind, failure)
            return VoterNotCaughtUpError(f"controller {node_id} {why}")
        case Refusal.TOO_OLD:
            return UnsupportedMetadataVersionError(
                f"controller {node_id} knows metadata.version 1 to {refused.level}, and the log of "
                f"this cluster needs {refused.needed}: it could not apply it, and did not become a "
                f"voter; next: install a newer Penstock on node {node_id}, start it and ask again"
            )
        case Refusal.NOT_ENOUGH_LIVE:
            return NotEnoughVotersError(
                f"the voters {voters} with controller {node_id} changed would have no majority "
                "that answers now, and the cluster would stand still; next: start the voters that "
                "are down, or remove those first"
            )
        case _:
            return InvalidRequestError(
                f"controller {node_id} can not be changed ({refused.reason.value}); the voters are "
                f"{voters}"
            )


def level_refused(level: int, lacking: Mapping[int, int]) -> PenstockError:
    """The error for a raise to a feature level that these do not know. Nothing was changed.

    ``lacking`` has the newest one that each of them knows, or 0 of one that has not said it yet.
    """
    older = {node_id: known for node_id, known in lacking.items() if known}
    if not older:
        return NetworkError(
            f"controller(s) {', '.join(map(str, lacking))} did not say yet whether they know "
            f"metadata.version {level}; nothing was changed; next: ask again, and start those that "
            "are down, or, of one that is gone for good, penstock quorum remove it"
        )
    known = ", ".join(f"{node_id} (which knows 1 to {most})" for node_id, most in older.items())
    return UnsupportedMetadataVersionError(
        f"metadata.version {level} is not known to controller(s) {known}, and nothing was changed; "
        "next: install a newer Penstock there and start it again, or, of one that is gone for "
        "good or still to be added, penstock quorum remove it"
    )


def voter_is_elsewhere(
    node_id: int, given: Address, *, known: Address, heard: Address
) -> InvalidRequestError:
    """The error for a voter that is to be found where it is not. Nothing was changed."""
    return InvalidRequestError(
        f"controller {node_id} is a voter already, known at {format_address(*known)} and heard at "
        f"{format_address(*heard)}, and not at {format_address(*given)}; next: penstock quorum add "
        f"{node_id}@{format_address(*heard)}, or set its controller.advertised and restart it first"
    )


def _not_caught_up(behind: int, failure: str) -> str:
    if behind >= 0:
        return (
            f"is {behind} entries behind, and did not become a voter; next: see that it runs, then "
            "ask again, with more time"
        )
    why = f" (the active controller heard last: {failure})" if failure else ""
    return (
        f"did not answer{why}, and did not become a voter; next: see that it runs, is reached at "
        "the address given, which is its controller.advertised, and, with tls.* set, has a "
        "certificate of an authority that the others trust, then ask again"
    )
