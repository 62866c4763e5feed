"""One direction of one connection: what waits in it, for what, and until when.

Nothing here touches a socket or a clock; ``relay`` moves the bytes.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

from penstock.chaos.backends.following import Holder, is_named
from penstock.chaos.cluster import LinkFault

NO_FAULT: Final = LinkFault()
"""The very object is what a link without a fault has: it is asked for with every piece."""

_QUEUE_S: Final = 0.1
"""Where the rate is limited, so much is taken in ahead of its time; the sender waits for more."""
_QUEUE_BYTES: Final = 8 * 1024 * 1024
_LEAST_PIECE_BYTES: Final = 256


class LinkState:
    """What a link does now, which all connections over it share."""

    def __init__(self, random: Random) -> None:
        self.fault = NO_FAULT
        self.random = random
        self.free_at = 0.0
        """When all that has been taken in has gone out, at the link's rate."""

    @property
    def largest_piece(self) -> int:
        """So many bytes at most are taken in at once, so that a limited rate is a steady one."""
        rate = self.fault.rate_bytes
        return 1 << 20 if rate is None else max(_LEAST_PIECE_BYTES, int(rate * _QUEUE_S / 4))

    def next_departure(self, size: int, now: float) -> float:
        """When so many bytes, taken in now, are at the other end."""
        fault = self.fault
        gone = now
        if fault.rate_bytes is not None:
            gone = self.free_at = max(now, self.free_at) + size / max(1, fault.rate_bytes)
        late_ms = fault.latency_ms
        if fault.jitter_ms:
            late_ms += self.random.uniform(0, fault.jitter_ms)
        return gone + late_ms / 1000


class Lane:
    """The queue of one direction. ``None`` in it stands for the end of what is sent."""

    def __init__(self, link: LinkState, holder: Holder | None, call: str = "") -> None:
        self._link = link
        self._holder = holder  # None: no HTTP/2, and all of it belongs to ``call``.
        self._call = call
        self._paced: deque[tuple[float, bytes | None]] = deque()
        self._paced_bytes = 0
        self._last_due = 0.0
        self._has_end = False  # It has come, and is behind what a holder has waiting.

    @property
    def is_cut(self) -> bool:
        """Whether nothing comes through now."""
        return self._link.fault.cut

    @property
    def largest_piece(self) -> int:
        """See LinkState."""
        return self._link.largest_piece

    def move_to(self, link: LinkState) -> None:
        """It is over this link that it goes."""
        self._link = link

    @property
    def is_plain(self) -> bool:
        """Whether bytes may go straight on: nothing is wrong with the link, and nothing waits."""
        return (
            self._link.fault is NO_FAULT
            and not self._paced
            and (self._holder is None or self._holder.is_idle)
        )

    def watch(self, data: bytes | memoryview) -> None:
        """These bytes have gone straight on."""
        if self._holder is not None:
            self._holder.watch(data)

    def wants_more(self, now: float) -> bool:
        """Whether to take in more, or to leave it to the sender to wait."""
        if self._link.fault.rate_bytes is not None and self._link.free_at - now > _QUEUE_S:
            return False
        held = 0 if self._holder is None else self._holder.waiting_bytes
        return self._paced_bytes + held < _QUEUE_BYTES

    def push(self, data: bytes, now: float) -> None:
        """Take in what has come."""
        fault = self._link.fault
        if self._holder is None:
            hold_ms = fault.hold_ms if is_named(self._call, fault.hold) else 0.0
            self._pace(data, now, hold_ms / 1000)
        elif fault.hold or not self._holder.is_idle:
            self._release(now)
            for piece in self._holder.feed(data, fault.hold, now, fault.hold_ms / 1000):
                self._pace(piece, now)
        else:
            self._holder.watch(data)
            self._pace(data, now)

    def push_end(self, now: float) -> None:
        """The sender sends no more. It gets there behind everything else."""
        self._has_end = True
        self._release(now)

    def take(self, now: float) -> list[bytes | None]:
        """What is at the other end by now, in its order."""
        self._release(now)
        found: list[bytes | None] = []
        while self._paced and self._paced[0][0] <= now:
            piece = self._paced.popleft()[1]
            self._paced_bytes -= len(piece or b"")
            found.append(piece)
        return found

    def put_back(self, piece: bytes) -> None:
        """It could not be written yet."""
        self._paced.appendleft((0.0, piece))
        self._paced_bytes += len(piece)

    def next_due(self) -> float | None:
        """When ``take`` has something, if nothing else comes."""
        dues = [self._paced[0][0]] if self._paced else []
        if self._holder is not None and self._holder.next_due is not None:
            dues.append(self._holder.next_due)
        return min(dues, default=None)

    def fault_changed(self, now: float) -> None:
        """The link does something else from now on; what waits, waits no longer than with that."""
        fault = self._link.fault
        if self._holder is not None and not fault.hold:
            for piece in self._holder.flush():
                self._pace(piece, now)
        late_ms = fault.latency_ms + fault.jitter_ms
        if self._holder is None and is_named(self._call, fault.hold):
            late_ms += fault.hold_ms
        limit = now + late_ms / 1000
        if fault.rate_bytes is not None:
            limit = float("inf")
        self._paced = deque((min(due, limit), piece) for due, piece in self._paced)
        self._last_due = min(self._last_due, limit)
        self._release(now)

    def _release(self, now: float) -> None:
        """Move on what was held for its time, and the end behind it."""
        if self._holder is not None:
            for piece in self._holder.take_due(now):
                self._pace(piece, now)
        if self._has_end and (self._holder is None or self._holder.next_due is None):
            self._has_end = False
            if self._holder is not None:
                for piece in self._holder.flush():
                    self._pace(piece, now)
            self._paced.append((max(self._last_due, self._link.next_departure(0, now)), None))

    def _pace(self, piece: bytes, now: float, hold_s: float = 0.0) -> None:
        due = self._link.next_departure(len(piece), now) + hold_s
        self._last_due = max(self._last_due, due)
        self._paced.append((self._last_due, piece))
        self._paced_bytes += len(piece)
