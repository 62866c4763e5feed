"""How to take back what the newest appends changed in a ProducerState. Pure.

With each change of the leader the replicas that stay cut what the new leader lacks: a few appends,
all of them made since the high watermark. Where such a replica is in sync, acks=all waits for that.
Without what is kept here the state at the cut has to be read from the log, from the last snapshot
on, which takes the longer the more was written since.

So an append leaves behind what it changed as it was before, until it is committed: what is
committed is cut by an unclean election alone, and then the log is read.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.producer_state import ProducerState, StateUndo

MOST_BYTES: Final = 400_000
"""Memory that what can be taken back of a partition takes at most, about: a thousand appends of one
producer each.
"""

_CHANGE_BYTES: Final = 400  # What was known of one producer.
_TRANSACTION_BYTES: Final = 100


def _size_bytes(before: StateUndo) -> int:
    """What it takes to remember that, about."""
    size_bytes = _CHANGE_BYTES * len(before.entries)
    if before.transactions is not None:
        size_bytes += _TRANSACTION_BYTES * len(before.transactions.first_offsets)
    return size_bytes


class _Step(NamedTuple):
    """One append: its first offset, that after its last, what it changed and what that takes."""

    begin: int
    end: int
    before: StateUndo
    size_bytes: int


class ProducerUndo:
    """The newest appends of one log, the last ones as far back as is known. One thread.

    What changes the state otherwise is to call ``clear``.
    """

    __slots__ = ("_known_from", "_size_bytes", "_steps")

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        # What appends changed from there on is in the steps. None before the first append.
        self._known_from: int | None = None
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def note(self, begin: int, end: int, stage: ProducerStage) -> None:
        """An append of these offsets is about to commit its stage."""
        if self._known_from is None:
            self._known_from = begin
        before = stage.undo()
        if before is not None:
            size_bytes = _size_bytes(before)
            self._steps.append(_Step(begin, end, before, size_bytes))
            self._size_bytes += size_bytes
            while self._size_bytes > MOST_BYTES:
                self._forget_oldest()

    def committed(self, offset: int) -> None:
        """What lies below ``offset`` will not be taken back."""
        while self._steps and self._steps[0].end <= offset:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        step = self._steps.popleft()
        self._size_bytes -= step.size_bytes
        self._known_from = step.end

    def state_at(self, end: int, state: ProducerState) -> tuple[ProducerState, int] | None:
        """The state at or a little before ``end``, and of which offset; None where it isn't known.

        ``state`` is the one of now, which stays as it is. What follows up to ``end`` are batches of
        one append.
        """
        if self._known_from is None or end < self._known_from or state.doubted:
            return None
        found, reached = state.copy(), end
        undos = []
        for step in reversed(self._steps):
            if step.end <= end:
                break
            undos.append(step.before)
            reached = min(end, step.begin)
        found.take_back(undos)
        return found, reached

    def cut(self, end: int) -> None:
        """The log ends at ``end`` now, and the state is the one there."""
        steps = self._steps
        while steps and steps[-1].end > end:
            step = steps.pop()
            if step.begin < end:
                steps.append(step._replace(end=end))
            else:
                self._size_bytes -= step.size_bytes
        if self._known_from is not None:
            self._known_from = min(self._known_from, end)

    def clear(self) -> None:
        """Nothing can be taken back of what was so far."""
        self._steps.clear()
        self._size_bytes = 0
        self._known_from = None
