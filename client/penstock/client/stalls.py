"""Why a consumer has nothing to hand out: for ``trouble``, and for who waits in vain."""

from __future__ import annotations

import logging
from typing import Final

from penstock.client.cluster import now_ms
from penstock.client.core.fetcher import Fetcher
from penstock.client.core.leader_watch import LeaderWatch
from penstock.client.core.stall_reasons import reason_of
from penstock.client.group_link import GroupLink
from penstock.client.positions import Positions
from penstock.wire.errors import ConsumerStalledError, LeaderNotAvailableError, PenstockError

_LOG: Final = logging.getLogger("penstock.client")
_STALL_MS: Final = 10_000.0


def stalled(trouble: PenstockError, lasted_ms: float) -> ConsumerStalledError:
    """What is raised when it will not mend."""
    error = ConsumerStalledError(
        f"no record for {lasted_ms / 1000:.0f} s, and what is in the way will not go by itself: "
        f"{trouble.message}"
    )
    error.reason = reason_of(trouble)
    return error


class Troubles:
    """Looks at what may be in the way. Belongs to one event loop."""

    def __init__(self, fetcher: Fetcher, group: GroupLink | None, positions: Positions) -> None:
        self._fetcher = fetcher
        self._group = group
        self._positions = positions

    def of_reading(self) -> PenstockError | None:
        """What keeps records from coming, that are to be read; its ``reason`` is set."""
        trouble = self._fetcher.trouble()
        if trouble is None and self._group is not None:
            trouble = self._group.trouble or self._group.waiting
        if trouble is None:
            trouble = self._fetcher.held_back(now_ms())
        return _with_reason(trouble)

    def any(self) -> PenstockError | None:
        """The same, and where it is not known yet where reading begins."""
        trouble = self.of_reading()
        return trouble if trouble is not None else _with_reason(self._positions.trouble())


class StallWatch:
    """How long nothing has come, and who hears of it. Belongs to one event loop."""

    def __init__(self, troubles: Troubles, fetcher: Fetcher) -> None:
        self._troubles = troubles
        self._fetcher = fetcher
        self._leader_watch = LeaderWatch()
        self._since_ms = float("inf")

    def look_at_leaders(self) -> None:
        """Log that partitions have no leader, or have one again."""
        if news := self._leader_watch.look(self._fetcher.leaderless(), now_ms()):
            _LOG.warning("%s", news)

    def end(self) -> None:
        """Something came."""
        self._since_ms = float("inf")

    def look_ms(self) -> float:
        """Look at what is in the way, and when to look again.

        Raises ConsumerStalledError for what will not mend, once that has lasted.
        """
        trouble = self._troubles.of_reading()
        if trouble is None:
            self.end()
        elif self._since_ms == float("inf"):
            self._since_ms = now_ms()
        elif now_ms() - self._since_ms >= _STALL_MS:
            if not trouble.retriable:
                self.end()
                raise stalled(trouble, _STALL_MS) from trouble
            if not (isinstance(trouble, LeaderNotAvailableError) and self._leader_watch.has_told):
                _LOG.warning("no record for %.0f s: %s", _STALL_MS / 1000, trouble)
            self._since_ms = now_ms()
        return min(_STALL_MS, self._leader_watch.due_in_ms(now_ms()))


def _with_reason(trouble: PenstockError | None) -> PenstockError | None:
    if trouble is not None:
        trouble.reason = reason_of(trouble)
    return trouble
