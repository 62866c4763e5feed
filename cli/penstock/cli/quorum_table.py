"""The controllers as commands show them: what is known, and by whom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.errors import report
from penstock.wire.transport import format_address
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client.descriptions import QuorumDescription, QuorumVoter


@dataclass(frozen=True, slots=True)
class ControllerRow:
    """One controller; None stands for what is not known."""

    node_id: int
    address: str
    state: str
    log_end: int | None
    behind: int | None
    silent_ms: int | None
    directory_id: str | None


def controller_rows(quorum: QuorumDescription) -> list[ControllerRow]:
    """The voters in order of node id, and after them the controller that is to become one."""
    voters = sorted(quorum.voters, key=lambda voter: voter.node_id)
    rows = [_row(voter, quorum, _state(voter, quorum)) for voter in voters]
    if quorum.catching_up is not None:
        state = "catching up" if quorum.catching_up.match_index >= 0 else "to be added, not heard"
        rows.append(_row(quorum.catching_up, quorum, state))
    return rows


def quorum_json(quorum: QuorumDescription) -> dict[str, Any]:
    """The quorum as programs are told of it."""
    return {
        **asdict(quorum),
        "tolerated_losses": quorum.tolerated_losses,
        "states": {row.node_id: row.state for row in controller_rows(quorum)},
    }


def leader_doubt(quorum: QuorumDescription) -> str:
    """What is wrong with the leadership and what to do, as a warning; empty if nothing is."""
    nodes = ", ".join(str(voter.node_id) for voter in quorum.voters)
    if quorum.confirmed:
        return ""
    if quorum.leader_id < 0:
        return (
            f"no controller leads, as far as controller {quorum.answered_by} knows: nothing can be "
            f"changed until a majority of {nodes} runs and reaches each other\n"
            "next: start those that are down, and look into the logs of the others"
        )
    if not quorum.role:
        return ""  # Older software, which cannot tell.
    if quorum.leader_id == quorum.answered_by:
        return (
            f"controller {quorum.answered_by} takes itself for the leader, and no majority of "
            f"{nodes} confirms it: it is cut off, or the others are down, and nothing can be "
            "changed\nnext: start those that are down, and look into the logs of the others"
        )
    return (
        f"only controller {quorum.answered_by} answered, which takes {quorum.leader_id} for the "
        f"leader\nnext: see whether controller {quorum.leader_id} runs, and ask again"
    )


def warn_of_no_tolerance(quorum: QuorumDescription) -> None:
    """Say on standard error that no controller may be lost, where that is so."""
    if quorum.tolerated_losses:
        return
    count = len(quorum.voters)
    loss, which = ("tolerates no loss", "it") if count == 1 else ("tolerate no loss", "either")
    more = "a third" if count == 2 else "two more"
    report(
        f"warning: {counted(count, 'voter')} {loss}: the cluster stands still while {which} is "
        f"down\nnext: add {more} with `penstock quorum add NODE@HOST:PORT`"
    )


def _leads(quorum: QuorumDescription) -> bool:
    return quorum.leader_id == quorum.answered_by


def _state(voter: QuorumVoter, quorum: QuorumDescription) -> str:
    if not _leads(quorum):
        if voter.node_id == quorum.answered_by:
            return quorum.role or "follower"
        return "said to lead" if voter.node_id == quorum.leader_id else "unknown"
    if voter.node_id == quorum.leader_id:
        return "leader"
    if voter.is_wiped:
        return "wiped: remove and add it"
    return "unreachable" if voter.is_unreachable else "follower"


def _row(voter: QuorumVoter, quorum: QuorumDescription, state: str) -> ControllerRow:
    known: int | None = voter.match_index if voter.match_index >= 0 else None
    if voter.node_id == quorum.answered_by and quorum.last_index >= 0:
        known = quorum.last_index  # Whoever answers knows its own, also when nobody leads.
    return ControllerRow(
        voter.node_id,
        format_address(voter.host, voter.port),
        state,
        known,
        max(0, quorum.commit_index - known) if known is not None and _leads(quorum) else None,
        voter.silent_ms if voter.silent_ms >= 0 else None,
        voter.directory_id or None,
    )
