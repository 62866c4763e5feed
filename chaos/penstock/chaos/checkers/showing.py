"""Shows the events that prove an anomaly, without the millions of records beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from penstock.chaos.checkers.records import partition_name
from penstock.chaos.history import Event, Operation

Shown: TypeAlias = Mapping[str, Any]
Touches: TypeAlias = Callable[[Sequence[Any], str], bool]
"""Whether a run of an event is about it; beside, the event's topic."""

_MOST_RUNS: Final = 5


def show(*operations: Operation, touches: Touches | None = None) -> Iterator[Shown]:
    """Their events; of their runs those alone that are about it."""
    for operation in operations:
        events = (operation.invoked, operation.completed)
        topic = (operation.invoked.value or {}).get("topic", "")
        yield from (_show(event, topic, touches) for event in events if event is not None)


def _show(event: Event, topic: str, touches: Touches | None) -> Shown:
    fields = event.fields()
    runs = event.value.get("runs") if isinstance(event.value, dict) else None
    if runs and len(runs) > 1:
        about = [run for run in runs if touches is None or touches(run, topic)][:_MOST_RUNS]
        fields["value"] = {**event.value, "runs": about, "runs_in_all": len(runs)}
    return fields


def at_offset(partition: str, offset: int) -> Touches:
    """Runs that have a record there."""

    def touches(run: Sequence[Any], topic: str) -> bool:
        if len(run) == 3:
            return bool(run[2] <= offset < run[2] + run[1])
        return partition_name(topic, run[0]) == partition and run[1] <= offset < run[1] + run[4]

    return touches


def of_number(partition: str, producer: str, number: int) -> Touches:
    """Runs that have this record."""

    def touches(run: Sequence[Any], topic: str) -> bool:
        if len(run) == 3:
            return bool(run[0] <= number < run[0] + run[1])
        here = (partition_name(topic, run[0]), run[2]) == (partition, producer)
        return here and run[3] <= number < run[3] + run[4]

    return touches


def span(start: int, end: int) -> str:
    """``7`` or ``7 to 9``: the numbers from ``start`` up to and without ``end``."""
    return str(start) if end == start + 1 else f"{start} to {end - 1}"
