"""What an operator is told when the voter set is not changed."""

from __future__ import annotations

from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.rules.changing import MOST_VOTERS, Refusal
from penstock.raft_meta.voters import Address
from penstock.wire.errors import (
    DuplicateVoterError,
    InvalidRequestError,
    LastVoterError,
    NotEnoughVotersError,
    PenstockError,
    UnknownVoterError,
    VoterChangeInProgressError,
    VoterNotCaughtUpError,
)
from penstock.wire.transport import format_address


def change_refused(
    reason: Refusal, node_id: int, status: QuorumStatus, *, behind: int = -1, failure: str = ""
) -> PenstockError:
    """The error for a change of ``node_id`` that did not happen. Nothing was changed.

    ``failure`` is why there was no stream to it the last time, if that is known.
    """
    voters = "none" if status.voters is None else str(sorted(status.voters.node_ids))
    match reason:
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
            return VoterNotCaughtUpError(f"controller {node_id} {_not_caught_up(behind, failure)}")
        case Refusal.NOT_ENOUGH_LIVE:
            return NotEnoughVotersError(
                f"the voters {voters} with controller {node_id} changed would have no majority "
                "that answers now, and the cluster would stand still; next: start the voters that "
                "are down, or remove those first"
            )
        case _:
            return InvalidRequestError(
                f"controller {node_id} can not be changed ({reason.value}); the voters are {voters}"
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
