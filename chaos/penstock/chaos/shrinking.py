"""Finds fewer faults that still break what a run broke: delta debugging over its schedule.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002). A run with
the same faults need not fail again, for the machine's timing is not repeated: so each schedule is
tried up to so many times, and counts as good only when none of these failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


class OutOfTrialsError(Exception):
    """No more runs are allowed: what was found so far stands."""


def smallest_failing(
    items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]
) -> Sequence[Item]:
    """A part of ``items``, in their order, that fails and none of whose parts less one item was
    seen to fail. ``items`` themselves are taken to fail; ``fails`` may raise OutOfTrialsError, with
    which the smallest part so far is the answer.
    """
    found = list(items)
    pieces = 2
    try:
        if fails([]):
            return []
        while len(found) > 1:
            smaller = next((part for part in _parts(found, pieces) if fails(part)), None)
            if smaller is not None:
                pieces = max(2, pieces - 1) if len(smaller) > len(found) // 2 else 2
                found = list(smaller)
            elif pieces < len(found):
                pieces = min(len(found), pieces * 2)
            else:
                break
    except OutOfTrialsError:
        pass
    return found


def _parts(items: Sequence[Item], pieces: int) -> Iterator[Sequence[Item]]:
    """Each piece alone, then all but each piece; nothing twice."""
    bounds = [len(items) * number // pieces for number in range(pieces + 1)]
    spans = [(low, high) for low, high in pairwise(bounds) if high > low]
    for low, high in spans:
        yield items[low:high]
    if len(spans) > 2:
        for low, high in spans:
            yield [*items[:low], *items[high:]]
