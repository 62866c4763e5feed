"""When partitions could not be written to: pure functions of a history.

A window of unavailability of a partition begins when a write to it is asked for (or goes on to be
under way) and none of those asked for succeeds, and ends with the next one that does. Writes that
nobody acknowledges (``acks=0``) say nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.chaos.history import Event, History, Type

LEAST_NS: Final = 500_000_000
"""Shorter windows are what writing takes."""
_WRITES: Final = ("append", "put")


@dataclass(frozen=True, slots=True)
class Window:
    """A partition could not be written to for so long."""

    partition: str
    start_t: int
    end_t: int
    is_open: bool = False
    """Whether nothing succeeded any more until the end of the load."""

    @property
    def lasted_ms(self) -> float:
        """How long."""
        return (self.end_t - self.start_t) / 1e6

    def overlaps(self, start_t: int, end_t: int) -> bool:
        """Whether it has to do with that time."""
        return self.start_t < end_t and self.end_t > start_t


class _Partition:
    def __init__(self, name: str, least_ns: int) -> None:
        self._name = name
        self._least_ns = least_ns
        self._under_way = 0
        self._waiting_since: int | None = None
        self.windows: list[Window] = []

    def asked(self, t: int) -> None:
        self._under_way += 1
        if self._waiting_since is None:
            self._waiting_since = t

    def answered(self, t: int, *, succeeded: bool) -> None:
        self._under_way -= 1
        if succeeded:
            self._end(t)
            self._waiting_since = t if self._under_way else None

    def ends(self, t: int) -> None:
        self._end(t, is_open=True)

    def _end(self, t: int, *, is_open: bool = False) -> None:
        since = self._waiting_since
        if since is not None and t - since >= self._least_ns:
            self.windows.append(Window(self._name, since, t, is_open))


def partition_of(value: Any) -> str:
    """``topic-3`` of what was asked."""
    return f"{value['topic']}-{value['partition']}"


def windows(history: History, least_ns: int = LEAST_NS) -> list[Window]:
    """All windows of at least so long, by their beginning."""
    places: dict[str, _Partition] = {}
    asked: dict[str, _Partition] = {}
    last_t = 0
    for event in history.events:
        if event.f not in _WRITES or event.phase:
            continue
        last_t = event.t
        if event.type is Type.INVOKE:
            if event.value.get("acks") == "0":
                continue
            name = partition_of(event.value)
            place = places.setdefault(name, _Partition(name, least_ns))
            asked[event.p] = place
            place.asked(event.t)
        elif (known := asked.pop(event.p, None)) is not None:
            known.answered(event.t, succeeded=event.type is Type.OK)
    for place in places.values():
        place.ends(last_t)
    found = [window for place in places.values() for window in place.windows]
    return sorted(found, key=lambda window: (window.start_t, window.partition))


def written_partitions(events: Iterable[Event]) -> list[str]:
    """All partitions that something was written to, in order."""
    found: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event.f in _WRITES and event.type is Type.INVOKE:
            found[event.value["topic"]].add(event.value["partition"])
    return [f"{topic}-{number}" for topic in sorted(found) for number in sorted(found[topic])]


def longest_ms(found: Sequence[Window]) -> float:
    """Of these, 0 where there are none."""
    return max((window.lasted_ms for window in found), default=0.0)
