"""Why a consumer has nothing to hand out: for ``trouble``, and for who waits in vain."""

from __future__ import annotations

from penstock.client.core.fetcher import Fetcher
from penstock.client.core.stall_reasons import reason_of
from penstock.client.group_link import GroupLink
from penstock.client.positions import Positions
from penstock.wire.errors import ConsumerStalledError, PenstockError


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
        return _with_reason(trouble)

    def any(self) -> PenstockError | None:
        """The same, and where it is not known yet where reading begins."""
        trouble = self.of_reading()
        return trouble if trouble is not None else _with_reason(self._positions.trouble())


def _with_reason(trouble: PenstockError | None) -> PenstockError | None:
    if trouble is not None:
        trouble.reason = reason_of(trouble)
    return trouble
