"""The committed changes of late, kept for whoever follows them: bounded, however slow they are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from penstock.raft_meta.guarding import Encoded

KEPT_CHANGES: Final = 10_000
"""A reader that is further behind must be given everything anew."""

KEPT_BYTES: Final = 16 * 1024 * 1024
"""... or further than this."""

_ENTRY_BYTES: Final = 210
"""What an entry takes besides its data: 209 bytes by tracemalloc, in CPython 3.11 on 64 bits. They
are the two records, the header of the bytes, two numbers and the place in the queue.
"""


@dataclass(frozen=True, slots=True)
class _Entry:
    response: Encoded
    index: int
    """Of the last change up to here."""
    epoch: int
    """The controller epoch of that change: the same index of another history has another."""
    size_bytes: int


class ChangeLog:
    """What is told to readers, by position. Positions only rise; old entries are forgotten."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._end = 0  # The position after the last entry.
        self._size_bytes = 0
        self._floor = (0, 0)  # Index and epoch of the last change before the first entry.

    @property
    def last_index(self) -> int:
        """The index of the last change that was told."""
        return self._last()[0]

    @property
    def end(self) -> int:
        """The position of what will be appended next."""
        return self._end

    def append(self, response: Encoded, change: tuple[int, int] | None) -> None:
        """Keep it, and forget the oldest beyond the bounds; the newest is always kept.

        ``change`` is the index and epoch of the change that it tells, if it tells one.
        """
        index, epoch = change or self._last()
        size = len(response.data) + _ENTRY_BYTES
        self._entries.append(_Entry(response, index, epoch, size))
        self._end += 1
        self._size_bytes += size
        while len(self._entries) > 1 and (
            len(self._entries) > KEPT_CHANGES or self._size_bytes > KEPT_BYTES
        ):
            oldest = self._entries.popleft()
            self._size_bytes -= oldest.size_bytes
            self._floor = (oldest.index, oldest.epoch)

    def restart(self, index: int, epoch: int) -> None:
        """Forget everything: what comes next follows a state at this index and epoch."""
        self._entries.clear()
        self._size_bytes = 0
        self._end += 1  # No reader's position is the new beginning.
        self._floor = (index, epoch)

    def at(self, position: int) -> Encoded | None:
        """What is there; None when it was forgotten, or is still to come."""
        offset = position - (self._end - len(self._entries))
        return self._entries[offset].response if 0 <= offset < len(self._entries) else None

    def has(self, position: int) -> bool:
        """A reader at this position has missed nothing."""
        return self._end - len(self._entries) <= position <= self._end

    def position_after(self, index: int, epoch: int) -> int | None:
        """Where a reader goes on that has everything up to ``index``, as of controller ``epoch``.

        None when that cannot be said: it lacks changes that were forgotten, or its past is another.
        """
        position = self._end
        for entry in reversed(self._entries):
            if entry.index <= index:
                return position if entry.epoch == epoch else None
            position -= 1
        floor_index, floor_epoch = self._floor
        return position if floor_index <= index and floor_epoch == epoch else None

    def contradicts(self, index: int, epoch: int) -> bool:
        """Whether what a reader has up to ``index``, as of controller ``epoch``, was given up.

        It was where a change up to there is of a newer epoch: epochs only rise in one history. A
        reader of a newer epoch than is known here contradicts nothing; it may know more.
        """
        for entry in reversed(self._entries):
            if entry.index <= index:
                return entry.epoch > epoch
        floor_index, floor_epoch = self._floor
        return floor_index <= index and floor_epoch > epoch

    def _last(self) -> tuple[int, int]:
        if not self._entries:
            return self._floor
        return self._entries[-1].index, self._entries[-1].epoch
