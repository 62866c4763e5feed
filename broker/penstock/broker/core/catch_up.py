"""What followers out of sync may be sent: one bandwidth, shared in turns.

Bytes are put on an account when they are sent, and paid off by time, at the rate of the settings,
and by growth: what is appended to a partition while a follower of it catches up is paid for at
once. So a backlog shrinks at the whole rate however fast producers write, and no rate, however low,
keeps a replica out of the in-sync set for ever.

Whoever sends gets a ticket, the height of the account after it, and sends again once so much is
paid. That is first come, first served: all that send at the same time get equal parts.
"""

from __future__ import annotations

from typing import Final

UNLIMITED: Final = 0
"""The rate that limits nothing."""

BURST_MS: Final = 100
"""Time in which nobody sends is credited up to this."""

MAX_CREDIT_BYTES: Final = 64 * 1024 * 1024
"""Growth that nobody takes is credited up to this."""


class CatchUpBudget:
    """The account. Times are of any monotonic clock, always the same one."""

    __slots__ = ("_bytes_per_second", "_paid_bytes", "_paid_ms", "sent_bytes")

    def __init__(self, bytes_per_second: int, now_ms: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._paid_bytes = 0.0
        self._paid_ms = now_ms
        self.sent_bytes = 0
        """All that was ever sent."""

    def set_rate(self, bytes_per_second: int, now_ms: int) -> None:
        """``replication.catchup.max.bytes.per.second`` is another; UNLIMITED for no limit."""
        self._pay(now_ms)
        self._bytes_per_second = bytes_per_second

    def grew(self, size_bytes: int, now_ms: int) -> None:
        """A partition that a follower catches up on grew by so much."""
        self._pay(now_ms)  # First: what was owed until now is paid by time.
        ceiling = max(self._paid_bytes, self.sent_bytes + MAX_CREDIT_BYTES)
        self._paid_bytes = min(self._paid_bytes + size_bytes, ceiling)

    def take(self, size_bytes: int, now_ms: int) -> int:
        """So much is sent now; the ticket with which to ask when more may be."""
        self._pay(now_ms)
        self.sent_bytes += size_bytes
        return self.sent_bytes

    def wait_ms(self, ticket: int, now_ms: int) -> int:
        """For how long the owner of the ticket is to wait, as things stand now; 0: it may send."""
        if self._bytes_per_second == UNLIMITED:
            return 0
        self._pay(now_ms)
        owed = ticket - self._paid_bytes
        return 0 if owed <= 0 else max(1, int(owed * 1000 / self._bytes_per_second))

    def _pay(self, now_ms: int) -> None:
        elapsed_ms = max(now_ms - self._paid_ms, 0)
        self._paid_ms += elapsed_ms
        if self._bytes_per_second == UNLIMITED:
            self._paid_bytes = max(self._paid_bytes, self.sent_bytes)
            return
        paid = self._paid_bytes + elapsed_ms * self._bytes_per_second / 1000
        ceiling = self.sent_bytes + BURST_MS * self._bytes_per_second / 1000
        self._paid_bytes = max(self._paid_bytes, min(paid, ceiling))
