"""What happens to the transactional ids that programs choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.broker.core import transaction_decisions as decisions
from penstock.broker.core.transaction_events import (
    AddPartitions,
    EndTransaction,
    InitProducerId,
)
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_values import (
    NOBODY,
    Cause,
    Identity,
    State,
    Transaction,
)
from penstock.v1 import transactions_pb2
from penstock.wire.transactional_ids import check_transactional_id


class TransactionalIds:
    """Handles what is asked about one id at a time. Refusals are raised as PenstockError.

    A request that waits for marks is put behind its entry, and handled again when they are there.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Final = ledger

    def init(self, entry: Entry, event: InitProducerId) -> None:
        """Give the id to a producer: under an identity that nobody else has, or might ask for."""
        request, ledger = event.request, self._ledger
        check_transactional_id(request.transactional_id)
        timeout_ms, instance_id = request.transaction_timeout_ms, request.instance_id
        decisions.check_new(timeout_ms, instance_id, ledger.settings.max_timeout_ms)
        value = ledger.present(entry)
        is_had = decisions.is_had_by(entry.transactional_id, value, instance_id)
        if value is None:
            value = Transaction(
                State.EMPTY, ledger.producer_id(), 0, timeout_ms, ledger.wall_ms, instance_id
            )
            ledger.put(entry, value)
        elif not is_had:
            if value.state is State.ONGOING:
                decisions.decide(ledger, entry, commit=False, cause=Cause.FENCED)
                value = ledger.ids[entry.transactional_id]
            if entry.is_ending:
                entry.waiting.append(event)
                return
            identity = decisions.following(ledger, value.identity)
            value = replace(
                decisions.resting(ledger, value, identity),
                timeout_ms=timeout_ms,
                instance_id=instance_id,
                superseded=value.superseding(),
                last=NOBODY,
                last_committed=False,
                last_cause=Cause.NOBODY,
                lapsed=False,
            )
            ledger.put(entry, value)
            ledger.settle(entry)
        self._respond(event, entry, value.identity)

    def add_partitions(self, entry: Entry, event: AddPartitions) -> None:
        """Take partitions into the transaction of an identity; it is opened by the first.

        Those that were kept for it are in it, and are not waited for.
        """
        value = self._ledger.present(entry)
        if value is None:
            raise decisions.unknown_id(entry.transactional_id)
        identity = decisions.identity_of(event)
        refusal = decisions.why_no_partitions(entry.transactional_id, value, identity)
        if refusal is not None:
            raise refusal
        if entry.is_ending and decisions.asked_for(event) <= value.kept:
            self._ledger.respond(entry.subject, event.request_id, event.answer())
        elif entry.is_ending:
            entry.waiting.append(event)
        else:
            decisions.enlist(self._ledger, entry, value, event)

    def end(self, entry: Entry, event: EndTransaction) -> None:
        """Decide about the transaction of an identity, or say what was decided."""
        ledger = self._ledger
        value = ledger.present(entry)
        if value is None:
            raise decisions.unknown_id(entry.transactional_id)
        identity, commit = decisions.identity_of(event), event.request.commit
        if value.was_last(identity):
            refusal = decisions.why_not_ended(entry.transactional_id, value, commit=commit)
            if refusal is not None:
                raise refusal
        elif value.has_lapsed(identity):
            if commit:
                raise decisions.aborted(entry.transactional_id)
        elif identity != value.identity or not value.is_owned:
            raise decisions.foreign(entry.transactional_id, value, identity)
        elif entry.is_ending:
            entry.waiting.append(event)
            return
        elif value.state is State.ONGOING:
            keep = decisions.named(value, event.request.keep)
            decisions.decide(ledger, entry, commit=commit, cause=Cause.PRODUCER, keep=keep)
        else:
            self._end_nothing(entry, value, commit=commit)
        decided = ledger.ids[entry.transactional_id]
        response = transactions_pb2.EndTransactionResponse(
            producer_id=decided.identity.producer_id,
            producer_epoch=decided.identity.epoch,
            kept_ms=decisions.kept_ms(ledger, decided),
        )
        ledger.respond(entry.subject, event.request_id, response)

    def _end_nothing(self, entry: Entry, value: Transaction, *, commit: bool) -> None:
        """Raise the epoch: what was sent for this transaction must not get into the next one."""
        ended = value.identity
        identity = decisions.following(self._ledger, ended)
        resting = replace(
            decisions.resting(self._ledger, value, identity),
            last=ended,
            last_committed=commit,
            last_cause=Cause.PRODUCER,
            lapsed=False,
        )
        self._ledger.put(entry, resting)
        self._ledger.settle(entry)

    def due(self, entry: Entry) -> None:
        """Do what time has come for: abort, write down that all marks are there, or forget."""
        ledger = self._ledger
        value = ledger.present(entry)
        if value is None:
            return
        if entry.is_ending:
            if value.kept and entry.expires_ms <= ledger.now_ms:
                decisions.give_up_kept(ledger, entry)
        elif value.state is State.ONGOING and entry.expires_ms <= ledger.now_ms:
            decisions.decide(ledger, entry, commit=False, cause=Cause.COORDINATOR)
        elif entry.is_done:
            if entry.note_ms <= ledger.now_ms:
                is_open = value.state is State.ONGOING
                noted = value if is_open else decisions.resting(ledger, value, value.identity)
                ledger.put(entry, noted)
                ledger.settle(entry)
        elif value.state is not State.EMPTY:
            return
        elif value.updated_ms + ledger.settings.id_expiration_ms <= ledger.wall_ms:
            ledger.put(entry, None)

    def deadline_ms(self, entry: Entry) -> int | None:
        """When :meth:`due` has something to do; None while only marks are awaited."""
        ledger = self._ledger
        value = ledger.present(entry)
        if value is None:
            return None
        if entry.is_ending:
            return entry.expires_ms if value.kept else None
        if value.state is State.ONGOING:
            return min(entry.expires_ms, entry.note_ms) if entry.is_done else entry.expires_ms
        if value.is_decided:
            return entry.note_ms
        idle_ms = ledger.wall_ms - value.updated_ms
        return ledger.now_ms + max(ledger.settings.id_expiration_ms - idle_ms, 0)

    def _respond(self, event: InitProducerId, entry: Entry, identity: Identity) -> None:
        response = transactions_pb2.InitProducerIdResponse(
            producer_id=identity.producer_id, producer_epoch=identity.epoch
        )
        self._ledger.respond(entry.subject, event.request_id, response)
