"""How much of what a connection brought lies in memory, since its requests are not whole yet.

Nobody says so: gRPC keeps the parts to itself. What is known is what the socket brought, what
whole requests were made of it, and what was sent, for which the peer sends acknowledgements. The
rest is parts, and what carries requests (frames, headers, TLS). For the latter more is allowed
than it takes, so that the sum is never above what there is, but for calls that were given up half
way: their parts are free again, and nobody says that either. Such a debt is forgiven by halves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_CALL_BYTES: Final = 1_024
"""What a call may take beside its requests: names, headers, the end."""

_REQUEST_BYTES: Final = 64
_PART_OF_REQUEST: Final = 128
"""One byte for each so many of a request, for what frames them: HTTP/2's take 1 of 1,800, those of
TLS 1 of 570."""

_PART_OF_ANSWERS: Final = 256
"""... and of what was sent: window updates take 1 of 1,260."""

_SECOND_BYTES: Final = 64
"""For pings, and questions of health."""

_HALVED_S: Final = 600.0


class Incoming:
    """One connection: ``held_bytes`` is what it has in parts, as far as that is known."""

    __slots__ = (
        "_allowed",
        "_looked_s",
        "_received",
        "_sent",
        "began_s",
        "has_asked",
        "held_bytes",
        "moved_s",
    )

    def __init__(self, now_s: float) -> None:
        self._allowed = 0.0
        self._received = 0
        self._sent = 0
        self._looked_s = now_s
        self.began_s = now_s
        self.has_asked = False
        """Whether ever a request of it became whole."""
        self.held_bytes = 0.0
        self.moved_s = now_s
        """When it was last found to have brought whole requests."""

    def begin_call(self) -> None:
        """It calls."""
        self._allowed += _CALL_BYTES

    def arrived(self, size_bytes: int) -> None:
        """A request of it is whole."""
        self.has_asked = True
        self._allowed += size_bytes + size_bytes / _PART_OF_REQUEST + _REQUEST_BYTES

    def look(self, received_bytes: int, sent_bytes: int, now_s: float) -> None:
        """So much was read from it and sent to it since it began."""
        if received_bytes < self._received or sent_bytes < self._sent:  # It is another one.
            self.held_bytes, self._received, self._sent = 0.0, 0, 0
        passed_s = now_s - self._looked_s
        came = received_bytes - self._received
        allowed = (
            self._allowed + (sent_bytes - self._sent) / _PART_OF_ANSWERS + passed_s * _SECOND_BYTES
        )
        kept: float = self.held_bytes * 0.5 ** (passed_s / _HALVED_S)
        self.held_bytes = max(0.0, kept + came - allowed)
        if self._allowed:
            self.moved_s = now_s
        self._allowed = 0.0
        self._received, self._sent, self._looked_s = received_bytes, sent_bytes, now_s


def too_many(connections: Iterable[Incoming], max_bytes: int) -> list[Incoming]:
    """Those to do without, so that the others have no more than ``max_bytes`` in parts together.

    Those with most go first, and of those with about the same who waits longest for a request to
    become whole.
    """
    held = [each for each in connections if each.held_bytes]
    left = sum(each.held_bytes for each in held)
    # Sizes within a factor of two are about the same.
    held.sort(key=lambda each: (-int(each.held_bytes).bit_length(), each.moved_s))
    chosen = []
    for each in held:
        if left <= max_bytes:
            break
        chosen.append(each)
        left -= each.held_bytes
    return chosen


def idle(connections: Iterable[Incoming], most: int) -> list[Incoming]:
    """Those to do without, so that no more than ``most`` are left, as far as there are any.

    They have asked for nothing yet. Those that have had longest for it go first.
    """
    everybody = [*connections]
    silent = [each for each in everybody if not each.has_asked]
    silent.sort(key=lambda each: each.began_s)
    return silent[: max(0, len(everybody) - most)]
