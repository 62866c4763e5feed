"""What an operator is told when the voter set is not changed."""

from __future__ import annotations

from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.rules.changing import Refusal
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


def change_refused(
    reason: Refusal, node_id: int, status: QuorumStatus, *, behind: int = -1
) -> PenstockError:
    """The error for a change of ``node_id`` that did not happen. Nothing was changed."""
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
        case Refusal.NOT_CAUGHT_UP:
            how_far = f"is {behind} entries behind" if behind >= 0 else "did not answer"
            return VoterNotCaughtUpError(
                f"controller {node_id} {how_far}, and did not become a voter; next: see that it "
                "runs and is reached at the address given, then ask again, with more time"
            )
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
