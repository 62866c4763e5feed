"""Which leader epoch wrote which offsets of one partition (KIP-101, KIP-279).

Pure. The history is a list of (leader epoch, first offset), both strictly rising. It decides
where two logs part: the log that diverged is cut at the end of the last epoch both know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.broker.core.ports import EpochEnd

_UNKNOWN: Final = EpochEnd(-1, -1)
_FOREVER: Final = 2**63 - 1


class EpochEntry(NamedTuple):
    """A leader epoch and the first offset it may have written."""

    leader_epoch: int
    start_offset: int


class EpochHistory:
    """The leader epochs of one log, oldest first."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[EpochEntry] = ()) -> None:
        self._entries: list[EpochEntry] = []
        for entry in entries:
            self.assign(*entry)

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        """Every epoch known, oldest first."""
        return tuple(self._entries)

    @property
    def last_epoch(self) -> int:
        """The newest epoch known, -1 for none."""
        return self._entries[-1].leader_epoch if self._entries else -1

    def assign(self, leader_epoch: int, start_offset: int) -> bool:
        """Note that ``leader_epoch`` begins at ``start_offset``; True when that was news.

        Entries that the new one contradicts (as new or newer, or starting as late or later) go:
        they were made by leaderships that wrote nothing here. Raises ValueError for an epoch
        older than one that has written below ``start_offset``: a log's epochs never go back.
        """
        if leader_epoch < 0 or start_offset < 0:
            raise ValueError(f"leader epoch {leader_epoch} at offset {start_offset}: below zero")
        if self._entries and self._entries[-1].leader_epoch == leader_epoch:
            if start_offset >= self._entries[-1].start_offset:
                return False
            raise ValueError(
                f"leader epoch {leader_epoch} began at {self._entries[-1].start_offset}, "
                f"so it cannot begin at {start_offset}"
            )
        kept = [entry for entry in self._entries if entry.start_offset < start_offset]
        if kept and kept[-1].leader_epoch >= leader_epoch:
            raise ValueError(
                f"leader epoch {leader_epoch} at offset {start_offset} is older than epoch "
                f"{kept[-1].leader_epoch}, which wrote from {kept[-1].start_offset} on"
            )
        kept.append(EpochEntry(leader_epoch, start_offset))
        self._entries = kept
        return True

    def epoch_at(self, offset: int) -> int:
        """The epoch in which ``offset`` was, or will be, written; -1 when older than any known."""
        index = bisect_right(self._entries, offset, key=lambda entry: entry.start_offset) - 1
        return self._entries[index].leader_epoch if index >= 0 else -1

    def span_at(self, offset: int) -> tuple[int, int]:
        """``epoch_at(offset)``, and the first offset above it that is another epoch's."""
        index = bisect_right(self._entries, offset, key=lambda entry: entry.start_offset)
        epoch = self._entries[index - 1].leader_epoch if index > 0 else -1
        until = self._entries[index].start_offset if index < len(self._entries) else _FOREVER
        return epoch, until

    def end_of_epoch(self, leader_epoch: int, log_end_offset: int) -> EpochEnd:
        """The largest known epoch not above ``leader_epoch`` and the first offset after it.

        For the newest epoch that is ``log_end_offset``; EpochEnd(-1, -1) when none is that old.
        """
        index = bisect_right(self._entries, leader_epoch, key=lambda entry: entry.leader_epoch) - 1
        if index < 0:
            return _UNKNOWN
        epoch = self._entries[index].leader_epoch
        if index + 1 == len(self._entries):
            return EpochEnd(epoch, log_end_offset)
        return EpochEnd(epoch, self._entries[index + 1].start_offset)

    def truncate_from_end(self, end_offset: int) -> bool:
        """Forget the epochs that begin at or after ``end_offset``; True when there were any."""
        kept = [entry for entry in self._entries if entry.start_offset < end_offset]
        changed = len(kept) != len(self._entries)
        self._entries = kept
        return changed

    def truncate_from_start(self, start_offset: int) -> bool:
        """Forget the epochs that end at or before ``start_offset``; True when something changed.

        The epoch that ``start_offset`` lies in is kept and begins there from now on.
        """
        index = bisect_right(self._entries, start_offset, key=lambda entry: entry.start_offset) - 1
        if index < 0 or (index == 0 and self._entries[0].start_offset == start_offset):
            return False
        first = EpochEntry(self._entries[index].leader_epoch, start_offset)
        self._entries[: index + 1] = [first]
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._entries = []

    def validate(self) -> None:
        """Raise AssertionError unless epochs and offsets both rise strictly. For tests."""
        for older, newer in zip(self._entries, self._entries[1:], strict=False):
            assert older.leader_epoch < newer.leader_epoch, self._entries
            assert older.start_offset < newer.start_offset, self._entries
        for entry in self._entries:
            assert entry.leader_epoch >= 0 <= entry.start_offset, self._entries
