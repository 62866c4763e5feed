"""What a controller that is no voter says of itself in its log, now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.rules.founding import IN_USE

_AGAIN_S: Final = 60.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reminder:
    """A line for the log: what is so, with what it is about, and what to do."""

    event: str
    next_step: str
    details: Mapping[str, object] = field(default_factory=dict)


class Reminders:
    """Says the same again now and then only, and at once what has changed. Times in seconds."""

    def __init__(self) -> None:
        self._said: Reminder | None = None
        self._said_s = 0.0

    def look(self, reminder: Reminder | None, now_s: float) -> None:
        """Log it, if it is time to."""
        again = reminder == self._said and now_s - self._said_s < _AGAIN_S
        if again or reminder is None:
            return
        self._said, self._said_s = reminder, now_s
        log.warning(reminder.event, **reminder.details, next_step=reminder.next_step)


def reminder_of(status: QuorumStatus, voter_ids: Sequence[int]) -> Reminder | None:
    """What this controller waits for; None for a voter."""
    if status.awaited:
        return _founding(status)
    if status.needs_permission:
        return Reminder(
            "this controller does not vote, and may not found a cluster",
            "if the cluster is new: stop this node, say penstock format --found with its directory "
            "and ids, and start it; if it joins a cluster, or comes back to one without its disk: "
            "penstock quorum add",
            {"voters": voter_ids},
        )
    if status.voters is None:
        return Reminder(
            "this controller knows of no voters",
            f"if the cluster is new: start node {status.founder_id}, which founds it, and look "
            "into its log; if this node joins a cluster: penstock quorum add",
            {"founder": status.founder_id},
        )
    if not status.is_voter:
        return Reminder(
            "this controller does not vote", "penstock quorum add", {"voters": voter_ids}
        )
    return None


def _founding(status: QuorumStatus) -> Reminder:
    refused = dict(sorted(status.founding_refusals.items()))
    details = {"missing": list(status.awaited), "refused": refused}
    if IN_USE not in refused.values():
        first = "mend what some are refused for, and start the others" if refused else "start them"
        return Reminder(
            "the first start of a cluster waits for every one of its controllers",
            f"{first}; controller.quorum.voters must be the same on all, and their directories "
            "new: docs/operating/controllers.md",
            details,
        )
    return Reminder(
        "this controller would found a cluster with controllers that belong to one already",
        f"nothing is founded anew. If it belongs to theirs, and lost its directory: "
        f"penstock quorum remove {status.node_id}, then penstock quorum add "
        f"{status.node_id}@HOST:PORT, asked of a broker of that cluster "
        "(docs/operating/controllers.md)",
        details,
    )
