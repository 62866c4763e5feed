"""Rules left out of what is known of producers."""

from __future__ import annotations

from typing import Any, Final

from penstock.broker.core.producer_entry import ProducerEntry
from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.producer_state import Append, Duplicate, ProducerState
from penstock.broker.core.transactions import EndedTransaction
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.known_bug import NO_LOSS, Bug
from penstock.wire.errors import DuplicateSequenceError, OutOfOrderSequenceError
from penstock.wire.records import BatchHeader


def _never_a_duplicate(_: ProducerState, __: BatchHeader, ___: object) -> Append:
    return Append()


_check_sequence = vars(ProducerState)["check_after"]


def _gaps_are_taken(self: ProducerState, header: BatchHeader, *rest: Any) -> Append | Duplicate:
    try:
        found: Append | Duplicate = _check_sequence(self, header, *rest)
    except OutOfOrderSequenceError:
        return Append()
    return found


_check_order = ProducerState._check_order


def _what_is_older_than_the_last_five_is_taken(header: BatchHeader, entry: ProducerEntry) -> None:
    try:
        _check_order(header, entry)
    except DuplicateSequenceError:
        return


_commit_stage = ProducerStage.commit


def _only_who_wrote_last_is_known(self: ProducerStage) -> list[EndedTransaction]:
    ended = _commit_stage(self)
    state = self._state
    last = {producer: entry.batches[-1].last_offset for producer, entry in state._entries.items()}
    for producer in sorted(last, key=lambda producer: last[producer])[:-4]:
        del state._entries[producer]
        state.forgotten_up_to = max(state.forgotten_up_to, producer)
    return ended


def _the_forgotten_are_strangers(self: ProducerState, now_ms: int, expiration_ms: int) -> int:
    gone = [
        producer
        for producer, entry in self._entries.items()
        if now_ms - entry.last_seen_ms >= expiration_ms and producer not in self.transactions
    ]
    for producer in gone:
        del self._entries[producer]
    return len(gone)


def _emptied_behind_deleted_records() -> tuple[Fault, ...]:
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


def _nothing_is_handed_over(_: ProducerState, __: int) -> bytes:
    return b""


def _all_is_handed_over(self: ProducerState, offset: int) -> bytes:
    return self.encode(offset, -1) if offset else b""


PRODUCER_BUGS: Final[dict[str, Bug]] = {
    "retries-are-appended-again": Bug(
        "a retried batch is appended a second time",
        ProducerState,
        "check_after",
        _never_a_duplicate,
    ),
    "sequence-gaps-are-taken": Bug(
        "a batch is appended though the one before it has not come",
        ProducerState,
        "check_after",
        _gaps_are_taken,
    ),
    "old-retries-are-appended-again": Bug(
        "a batch is appended again that is older than the five that are remembered",
        ProducerState,
        "_check_order",
        staticmethod(_what_is_older_than_the_last_five_is_taken),
        (),
        {**NO_LOSS, "late": 0.0},
    ),
    "silent-producers-are-forgotten": Bug(
        "a producer is forgotten as soon as four others have written after it",
        ProducerStage,
        "commit",
        _only_who_wrote_last_is_known,
        ("another producer",),
        {**NO_LOSS, "late": 0.0},
    ),
    "producers-are-not-handed-over": Bug(
        "who begins anew behind deleted records knows nothing of their producers",
        ProducerState,
        "handed_over",
        _nothing_is_handed_over,
        (),
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 1, "hands_over": True, "left_over": 0.9},
        _emptied_behind_deleted_records(),
    ),
    "producers-of-later-records-are-handed-over": Bug(
        "who begins anew is told of batches that it has not copied yet",
        ProducerState,
        "handed_over",
        _all_is_handed_over,
        ("delete records", "lost disk", "move", "kill leader", "slow network"),
        {**NO_LOSS, "hands_over": True},
    ),
    "forgotten-producers-are-strangers": Bug(
        "who was silent until it was forgotten is refused for ever, as if it had never written",
        ProducerState,
        "expire",
        _the_forgotten_are_strangers,
        ("restart",),
        {**NO_LOSS, "quiet_ms": 120_000, "producer_expiration_ms": 10_000, "retention_ms": 0},
    ),
}
