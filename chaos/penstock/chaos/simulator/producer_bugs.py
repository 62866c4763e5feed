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
