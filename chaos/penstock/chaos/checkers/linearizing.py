"""Searches for an order of operations that one register, doing one at a time, could have done.

The search is Wing's and Gong's, with Lowe's memory of what was tried: an operation may be put next
where no other one, not yet put, had ended before it began. What is tried is remembered by the set
of operations put and the value that they leave. The worst case stays exponential, so a budget of
steps ends it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

NEVER: Final = 1 << 62
"""When an operation ends of which nobody knows whether it was done: it may be done at any time."""


@dataclass(frozen=True, slots=True)
class Step:
    """An operation on a register: it was done at one moment between ``begun`` and ``ended``.

    A read has ``expected`` alone, what it was told; a write has ``written``; a compare-and-set has
    both.
    """

    begun: int
    ended: int
    writes: bool
    expects: bool
    written: Hashable = None
    expected: Hashable = None

    def fits(self, value: Hashable) -> bool:
        """Whether it can be done where the register has this value."""
        return not self.expects or self.expected == value


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a search. ``stuck`` is a step that nothing fits before its end, with the value that the
    register has where the most steps were put; ``linearizable`` is None where it was given up.
    """

    linearizable: bool | None
    steps: int
    stuck: int | None = None
    value: Hashable = None


def without_idle(steps: Sequence[Step]) -> list[int]:
    """The places of the steps that matter: one that may never have been done can be left out where
    nobody was told what it writes.
    """
    told = {step.expected for step in steps if step.expects}
    return [
        place
        for place, step in enumerate(steps)
        if step.ended != NEVER or (step.writes and step.written in told)
    ]


def search(steps: Sequence[Step], initial: Hashable, budget: int) -> Outcome:
    """Whether there is an order. At most ``budget`` steps are tried."""
    return _Search(steps, initial).run(budget)


class _Search:
    """Beginnings and ends by time as a list with links both ways, from which steps are taken out.

    The node of a step's beginning is its place, that of its end its place and the number of steps.
    """

    def __init__(self, steps: Sequence[Step], initial: Hashable) -> None:
        self._steps: Final = steps
        self._value = initial
        count = len(steps)
        self._head: Final = 2 * count
        begins = [(step.begun, 0, place) for place, step in enumerate(steps)]
        ends = [
            (step.ended, 1, place + count)
            for place, step in enumerate(steps)
            if step.ended != NEVER
        ]
        order = [self._head, *(node for _, _, node in sorted(begins + ends)), self._head]
        self._next, self._before = [0] * (2 * count + 1), [0] * (2 * count + 1)
        for one, other in pairwise(order):
            self._next[one], self._before[other] = other, one
        self._unended = len(ends)
        self._put: list[tuple[int, Hashable]] = []
        self._mask = 0

    def run(self, budget: int) -> Outcome:
        """Put one after the other, and take back where nothing fits."""
        tried: set[tuple[int, int, Hashable]] = set()
        node = self._next[self._head]
        deepest: tuple[int, int | None, Hashable] = (-1, None, self._value)
        taken = 0
        while self._unended:
            taken += 1
            if taken > budget:
                return Outcome(None, taken)
            if node < len(self._steps):
                if self._fits_anew(node, tried):
                    self._place(node)
                    node = self._next[self._head]
                else:
                    node = self._next[node]
                continue
            if len(self._put) > deepest[0]:
                deepest = (len(self._put), node - len(self._steps), self._value)
            if not self._put:
                return Outcome(False, taken, deepest[1], deepest[2])
            node = self._next[self._take_back()]
        return Outcome(True, taken)

    def _fits_anew(self, node: int, tried: set[tuple[int, int, Hashable]]) -> bool:
        step = self._steps[node]
        if not step.fits(self._value):
            return False
        mask = self._mask | 1 << node
        # What all of the first steps are part of needs no remembering.
        low = (~mask & (mask + 1)).bit_length() - 1
        key = (low, mask >> low, step.written if step.writes else self._value)
        if key in tried:
            return False
        tried.add(key)
        return True

    def _nodes(self, node: int) -> Iterator[int]:
        yield node
        if self._steps[node].ended != NEVER:
            yield node + len(self._steps)

    def _place(self, node: int) -> None:
        step = self._steps[node]
        self._put.append((node, self._value))
        self._mask |= 1 << node
        if step.writes:
            self._value = step.written
        for one in self._nodes(node):
            self._next[self._before[one]] = self._next[one]
            self._before[self._next[one]] = self._before[one]
        self._unended -= step.ended != NEVER

    def _take_back(self) -> int:
        node, self._value = self._put.pop()
        self._mask ^= 1 << node
        for one in reversed(list(self._nodes(node))):
            self._next[self._before[one]] = one
            self._before[self._next[one]] = one
        self._unended += self._steps[node].ended != NEVER
        return node
