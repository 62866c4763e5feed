"""Rules left out of what is kept from one transaction to the next (ADR 13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from penstock.broker.core import transaction_decisions
from penstock.broker.core.kept_words import KeptWords
from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_values import NO_PARTICIPANTS, Cause
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.known_bug import Bug
from penstock.chaos.simulator.transactions import leading
from penstock.wire.errors import InvalidTxnStateError

TRANSACTIONS: Final[dict[str, object]] = {"transactions": True}

# Coordinating.

_decide = transaction_decisions.decide
_put = Ledger.put


def _without_marks_of_what_was_kept(causes: frozenset[Cause]) -> Callable[..., None]:
    def decide(ledger: Ledger, entry: Entry, *, cause: Cause, **how: Any) -> None:
        value = ledger.present(entry)
        if value is None or not value.kept or cause not in causes:
            _decide(ledger, entry, cause=cause, **how)
            return

        def put(entry: Entry, value: Any) -> None:
            _put(ledger, entry, replace(value, partitions=NO_PARTICIPANTS))

        ledger.put = put  # type: ignore[method-assign]
        try:
            _decide(ledger, entry, cause=cause, **how)
        finally:
            del ledger.put

    return decide


# Leading.

_marked = KeptWords.marked


def _words_outlive_later_marks(
    self: KeptWords, partition: Any, producer_id: int, producer_epoch: int, *, kept: bool
) -> None:
    before = (partition, producer_id) in self._epochs
    _marked(self, partition, producer_id, producer_epoch, kept=kept or before)


_ANY_EPOCH: Final = -1


def _words_outlive_leaderships(self: KeptWords, partition: Any) -> None:
    for producer_id in self._producers.get(partition, ()):
        self._epochs[partition, producer_id] = _ANY_EPOCH


def _led_by_the_same_again() -> tuple[Fault, ...]:
    """Brokers are cut off until others lead, and lead again soon after they are back."""
    faults: list[Fault] = []
    for number, node in enumerate((1, 2, 3)):
        at_ms = 800 + 3700 * number
        faults.append(Fault(at_ms, "split", (node,), 2000))
        faults += [Fault(at_ms + 2400 + 50 * count, "elect") for count in range(20)]
    return tuple(faults)


def _of_this_epoch_or_leadership(
    self: KeptWords, partition: Any, producer_id: int, producer_epoch: int
) -> bool:
    return self._epochs.get((partition, producer_id)) in (producer_epoch, _ANY_EPOCH)


def _nothing_is_behind(_: object, __: int, ___: int) -> bool:
    return False


_check_transaction = ProducerStage.check_transaction


def _begun_while_another_is_open(self: ProducerStage, header: Any, verified: Any) -> None:
    try:
        _check_transaction(self, header, verified)
    except InvalidTxnStateError:
        if verified != (header.producer_id, header.producer_epoch):
            raise


KEPT_BUGS: Final[dict[str, Bug]] = {
    "what-is-kept-outlives-its-producer": Bug(
        "what was kept gets no marks where another producer takes the id",
        transaction_decisions,
        "decide",
        _without_marks_of_what_was_kept(frozenset({Cause.FENCED})),
        given=TRANSACTIONS | {"timeout_ms": 3000},
        faults=tuple(Fault(600 + 200 * number, "another producer") for number in range(55)),
    ),
    "what-is-kept-outlives-its-time": Bug(
        "what was kept gets no marks where its time is over",
        transaction_decisions,
        "decide",
        _without_marks_of_what_was_kept(frozenset({Cause.COORDINATOR})),
        given=TRANSACTIONS | {"timeout_ms": 300},
    ),
    "words-outlive-later-marks": Bug(
        "a leader goes by what a mark said after one that did not say it",
        KeptWords,
        "marked",
        _words_outlive_later_marks,
        given=TRANSACTIONS,
    ),
    "words-outlive-leaderships": Bug(
        "a leader goes by what a mark said when it led before",
        KeptWords,
        "leadership_ended",
        _words_outlive_leaderships,
        given=TRANSACTIONS,
        faults=_led_by_the_same_again(),
        also=((KeptWords, "holds", _of_this_epoch_or_leadership),),
    ),
    "batches-before-the-mark": Bug(
        "a batch is appended before the mark of its producer's transaction before",
        leading,
        "is_behind",
        _nothing_is_behind,
        given=TRANSACTIONS,
        also=((ProducerStage, "check_transaction", _begun_while_another_is_open),),
    ),
}
