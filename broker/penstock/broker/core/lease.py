"""The broker's lease: how long it may go on serving without word from the controllers.

The controller fences a broker session_timeout_ms after it last *heard* it. The lease counts
from when the broker last *sent* a heartbeat that was answered, which is earlier: a broker that
is cut off stops serving before another can have taken over by that time-out.
"""

from __future__ import annotations


class Lease:
    """Valid from the first answered heartbeat until session_timeout_ms after the last one."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._sent_ms: int | None = None  # When the newest answered heartbeat was sent.

    def answered(self, sent_ms: int) -> None:
        """A heartbeat sent at ``sent_ms`` was answered. Answers may come in any order."""
        if self._sent_ms is None or sent_ms > self._sent_ms:
            self._sent_ms = sent_ms

    def lost(self) -> None:
        """The controllers disowned this broker: the lease is over at once."""
        self._sent_ms = None

    def silent_ms(self, now_ms: int) -> int | None:
        """How long ago the newest answered heartbeat was sent; None before the first."""
        return None if self._sent_ms is None else now_ms - self._sent_ms

    def valid(self, now_ms: int) -> bool:
        """Whether the broker may serve at ``now_ms`` (monotonic milliseconds)."""
        silent_ms = self.silent_ms(now_ms)
        return silent_ms is not None and silent_ms < self._session_timeout_ms


class MetadataLag:
    """For how long a feed has kept from the broker what the active controller told of.

    Time in which the broker acted on a change, and took nothing from the feed, is not the feed's.
    """

    def __init__(self) -> None:
        self._told_index = -1  # The least index that is still missing; -1 while none is.
        self._since_ms = 0
        self._acting_since_ms: int | None = None  # While the broker acts on a change.

    def told(self, index: int, reached_index: int, now_ms: int) -> None:
        """The controller's metadata are at ``index``, those that the broker took at
        ``reached_index``.
        """
        if self._told_index < 0 and index > reached_index:
            self._told_index = index
            self._since_ms = now_ms

    def reached(self, index: int) -> None:
        """The broker took the metadata up to ``index``."""
        if index >= self._told_index:
            self._told_index = -1

    def acting(self, now_ms: int) -> None:
        """The broker begins to act on what it took, and takes nothing more meanwhile."""
        self._acting_since_ms = now_ms

    def acted(self, now_ms: int) -> None:
        """It is done, and takes what comes."""
        self._since_ms = now_ms - self.behind_ms(now_ms)
        self._acting_since_ms = None

    def behind_ms(self, now_ms: int) -> int:
        """For how long something told of has been missing; 0 when nothing is."""
        until_ms = now_ms if self._acting_since_ms is None else self._acting_since_ms
        return 0 if self._told_index < 0 else max(0, until_ms - self._since_ms)
