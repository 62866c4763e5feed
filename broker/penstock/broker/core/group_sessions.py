"""What is known of members' connections, and the deadlines of a group.

Not durable: a new coordinator gives every member its whole time anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.broker.core.group_values import JOIN_EPOCH, Member, Partitions

NO_STREAM: Final = -1


@dataclass(slots=True)
class Session:
    """One member's connection. Times are of the monotonic clock."""

    deadline_ms: int  # Removed, unless heard before.
    revoke_by_ms: int | None = None  # Removed, unless it gave back by then what it must.
    stream_id: int = NO_STREAM
    used_epoch: int = JOIN_EPOCH  # The newest epoch that it named; older ones are fenced.
    told: tuple[int, Partitions] | None = None  # Epoch and assignment last sent on the stream.


class Sessions:
    """A group's sessions by member id, and when to look at them next.

    ``next_deadline_ms`` is no later than any deadline. Deadlines mostly move on, so it is found
    anew only when it has passed, and a heartbeat costs the same however large the group.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self.assign_at_ms: int | None = None  # When the target assignment is due.
        self.recheck_at_ms: int | None = None  # When to try again what could not be written.
        self.next_deadline_ms: int | None = None

    def __getitem__(self, member_id: str) -> Session:
        return self._sessions[member_id]

    def ids(self) -> list[str]:
        """The members that have a session."""
        return list(self._sessions)

    def heard(self, member: Member, stream_id: int, epoch: int, now_ms: int) -> None:
        """The member spoke on a stream and named an epoch."""
        deadline_ms = now_ms + member.session_timeout_ms
        session = self._sessions.setdefault(member.member_id, Session(deadline_ms))
        session.deadline_ms = deadline_ms
        session.used_epoch = epoch
        if session.stream_id != stream_id:
            session.stream_id, session.told = stream_id, None
        self.arm(deadline_ms)

    def start(self, member: Member, now_ms: int) -> None:
        """Give the member its whole time, without a connection."""
        session = Session(now_ms + member.session_timeout_ms)
        self._sessions[member.member_id] = session
        self.arm(session.deadline_ms)
        self.watch_revocation(member, now_ms)

    def drop(self, member_id: str) -> Session | None:
        """Forget a member."""
        return self._sessions.pop(member_id, None)

    def watch_revocation(self, member: Member, now_ms: int) -> None:
        """The time to give partitions back runs from when the first is asked for."""
        session = self._sessions[member.member_id]
        if not member.revoking:
            session.revoke_by_ms = None
        elif session.revoke_by_ms is None:
            session.revoke_by_ms = now_ms + member.rebalance_timeout_ms
            self.arm(session.revoke_by_ms)

    def postpone(
        self, touched: Iterable[tuple[str, Member | None]], now_ms: int, to_ms: int
    ) -> None:
        """Changes of these members were taken back: nothing is due before ``to_ms``.

        What members were told is not known any more: it may have been about what is undone.
        """
        for member_id, member in touched:
            if member is None:
                self.drop(member_id)
            elif member_id not in self._sessions:
                self.start(member, now_ms)
            else:
                self.watch_revocation(member, now_ms)
        for session in self._sessions.values():
            session.told = None
            session.deadline_ms = max(session.deadline_ms, to_ms)
            if session.revoke_by_ms is not None:
                session.revoke_by_ms = max(session.revoke_by_ms, to_ms)
        self.recheck_at_ms = to_ms
        self.find_deadline()

    def arm(self, deadline_ms: int) -> None:
        """There is a deadline at this time."""
        if self.next_deadline_ms is None or deadline_ms < self.next_deadline_ms:
            self.next_deadline_ms = deadline_ms

    def find_deadline(self) -> None:
        """Find the next deadline exactly."""
        self.next_deadline_ms = None
        for session in self._sessions.values():
            self.arm(session.deadline_ms)
            if session.revoke_by_ms is not None:
                self.arm(session.revoke_by_ms)
        for deadline_ms in (self.assign_at_ms, self.recheck_at_ms):
            if deadline_ms is not None:
                self.arm(deadline_ms)

    def validate(self, members: Iterable[Member]) -> None:
        """Assert that the members have sessions, and these fit."""
        by_id = {member.member_id: member for member in members}
        assert self._sessions.keys() == by_id.keys()
        for member_id, session in self._sessions.items():
            assert bool(by_id[member_id].revoking) == (session.revoke_by_ms is not None)
            assert self.next_deadline_ms is not None
            assert self.next_deadline_ms <= session.deadline_ms
            assert self.next_deadline_ms <= (session.revoke_by_ms or session.deadline_ms)
