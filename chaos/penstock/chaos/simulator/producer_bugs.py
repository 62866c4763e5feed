"""Rules about producers left out, for penstock.chaos.simulator.bugs."""

from __future__ import annotations

from typing import Any

from penstock.broker.core.producer_state import (
    Append,
    Duplicate,
    ProducerEntry,
    ProducerStage,
    ProducerState,
)
from penstock.chaos.simulator.faults import Fault
from penstock.wire.errors import DuplicateSequenceError, OutOfOrderSequenceError
from penstock.wire.records import BatchHeader


def never_a_duplicate(_: ProducerState, __: BatchHeader, ___: object) -> Append:
    """Whatever comes is new."""
    return Append()


_check_sequence = vars(ProducerState)["_check"]


def gaps_are_taken(self: ProducerState, header: BatchHeader, *rest: Any) -> Append | Duplicate:
    """What comes out of order is taken."""
    try:
        found: Append | Duplicate = _check_sequence(self, header, *rest)
    except OutOfOrderSequenceError:
        return Append()
    return found


_check_order = ProducerState._check_order


def what_is_older_than_the_last_five_is_taken(header: BatchHeader, entry: ProducerEntry) -> None:
    """Of what is in the log only the last five batches are refused."""
    try:
        _check_order(header, entry)
    except DuplicateSequenceError:
        return


_commit_stage = ProducerStage.commit


def only_who_wrote_last_is_known(self: ProducerStage) -> None:
    """Four producers are remembered: those that wrote last."""
    _commit_stage(self)
    state = self._state
    last = {producer: entry.batches[-1].last_offset for producer, entry in state._entries.items()}
    for producer in sorted(last, key=lambda producer: last[producer])[:-4]:
        del state._entries[producer]
        state.forgotten_up_to = max(state.forgotten_up_to, producer)


def emptied_behind_deleted_records() -> tuple[Fault, ...]:
    """Producers end, what they wrote is deleted, and a leader begins anew and leads again."""
    faults: list[Fault] = []
    for number, node in enumerate((1, 2, 3)):
        at_ms = 1500 + 3500 * number
        faults += [
            *(Fault(at_ms + 40 * count, "another producer") for count in range(4)),
            *(Fault(at_ms + 300 + 20 * count, "delete records") for count in range(3)),
            Fault(at_ms + 400, "lost disk", (node,), 60),
            *(Fault(at_ms + 1200 + 300 * count, "elect") for count in range(3)),
        ]
    return tuple(faults)


def nothing_is_handed_over(_: ProducerState, __: int) -> bytes:
    """Who begins anew takes any first sequence."""
    return b""


def all_is_handed_over(self: ProducerState, offset: int) -> bytes:
    """Who begins anew takes what it has not copied yet for what is in its log."""
    return self.encode(offset, -1) if offset else b""
