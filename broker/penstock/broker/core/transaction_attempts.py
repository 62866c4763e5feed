"""What happens to engines' task attempts, and to the groups that decide about them.

An attempt is open from when it begins, under an identity of its own that it keeps until it ends.
That it has ended is kept until its group has decided its epoch number, or it was not used for as
long as an id is: else a copy of its BeginAttempt, which comes late, would open it again, and its
group would commit an attempt that has nothing while what it wrote is aborted. One that begins under
the same numbers gets a producer id that nobody had.
Its group's commit decides about it without touching its record: how it ends is read from both.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from penstock.broker.core import transaction_codec
from penstock.broker.core import transaction_decisions as decisions
from penstock.broker.core.transaction_events import (
    AddPartitions,
    BeginAttempt,
    CommitGroup,
    EndTransaction,
)
from penstock.broker.core.transaction_ledger import Entry, Group, Ledger
from penstock.broker.core.transaction_values import (
    Cause,
    GroupCommit,
    Identity,
    State,
    Transaction,
    Winner,
)
from penstock.v1 import transactions_pb2
from penstock.wire.errors import (
    GroupCommitConflictError,
    InvalidRequestError,
    InvalidTxnStateError,
    PenstockError,
    ProducerFencedError,
    StaleGroupCommitError,
    UnknownAttemptError,
)
from penstock.wire.transactional_ids import Attempt, check_commit_group, parse_attempt

_MAX_WINNERS: Final = 10_000
"""Of one commit: their record stays below the max.message.bytes of the topic."""
_MAX_METADATA_BYTES: Final = 4_096


def attempt_of(request: transactions_pb2.BeginAttemptRequest) -> Attempt:
    """The attempt that a request names. Raises a typed error when no attempt has such a name."""
    check_commit_group(request.group)
    for name in ("epoch_number", "task", "attempt"):
        if getattr(request, name) < 0:
            raise InvalidRequestError(
                f"an attempt of group {request.group!r} with {name} {getattr(request, name)}; "
                "count from 0"
            )
    return Attempt(request.group, request.epoch_number, request.task, request.attempt)


def winners_of(request: transactions_pb2.CommitGroupRequest) -> tuple[Winner, ...]:
    """The winners that a commit names. Raises a typed error when they cannot win together."""
    check_commit_group(request.group)
    where = f"the commit of epoch number {request.epoch_number} of group {request.group!r}"
    if request.epoch_number < 0:
        raise InvalidRequestError(f"{where}: count from 0")
    if request.winner_ids:
        raise InvalidRequestError(
            f"{where} names its winners by their ids, as software of before did; update the "
            "client, which names them by their handles"
        )
    if len(request.winners) > _MAX_WINNERS:
        raise InvalidRequestError(
            f"{where} has {len(request.winners)} winners; {_MAX_WINNERS} are allowed"
        )
    if len(request.metadata) > _MAX_METADATA_BYTES:
        raise InvalidRequestError(
            f"{where} has {len(request.metadata)} bytes of metadata; {_MAX_METADATA_BYTES} are "
            "allowed"
        )
    winners = tuple(map(transaction_codec.winner, request.winners))
    for winner in winners:
        if min(winner) < 0:
            raise InvalidRequestError(f"{where} names {winner}; none of its numbers is below 0")
    for task, count in Counter(winner.task for winner in winners).items():
        if count > 1:
            raise InvalidRequestError(f"{where} names {count} winners of task {task}; one can win")
    return winners


class Attempts:
    """Handles what is asked about one attempt or group at a time; raises as TransactionalIds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Final = ledger

    # ------------------------------------------------------------------ attempts

    def begin(self, entry: Entry, event: BeginAttempt) -> None:
        """Open the transaction of an attempt; one of the same numbers before it is fenced."""
        request, ledger = event.request, self._ledger
        attempt = attempt_of(request)
        timeout_ms, instance_id = request.transaction_timeout_ms, request.instance_id
        decisions.check_new(timeout_ms, instance_id, ledger.settings.max_timeout_ms)
        if ledger.is_decided_by_group(attempt):
            last = ledger.commits[attempt.group].epoch_number
            raise StaleGroupCommitError(
                f"group {attempt.group!r} has committed epoch number {last}; an attempt at "
                f"{attempt.epoch_number} comes too late"
            )
        value = ledger.ids.get(entry.transactional_id)
        if value is None or not decisions.is_had_by(entry.transactional_id, value, instance_id):
            if value is not None and value.state is State.ONGOING:
                decisions.decide(ledger, entry, commit=False, cause=Cause.FENCED)
            if entry.is_ending:
                entry.waiting.append(event)
                return
            now_ms = ledger.wall_ms
            value = Transaction(
                State.ONGOING,
                ledger.producer_id(),
                0,
                timeout_ms,
                now_ms,
                instance_id,
                start_ms=now_ms,
                superseded=() if value is None else value.superseding(),
            )
            ledger.put(entry, value)
            ledger.settle(entry)
        response = transactions_pb2.BeginAttemptResponse(
            attempt_id=entry.transactional_id,
            producer_id=value.producer_id,
            producer_epoch=value.epoch,
        )
        ledger.respond(entry.subject, event.request_id, response)

    def add_partitions(self, entry: Entry, event: AddPartitions) -> None:
        """Take partitions into the transaction of an attempt that is open."""
        assert entry.attempt is not None
        if self._ledger.is_decided_by_group(entry.attempt):
            raise ProducerFencedError(
                f"group {entry.subject!r} has decided about {entry.transactional_id!r}; what this "
                "attempt still writes comes too late"
            )
        value = self._ledger.ids.get(entry.transactional_id)
        if value is None:
            raise decisions.unknown_id(entry.transactional_id)
        identity = decisions.identity_of(event)
        refusal = decisions.why_no_partitions(entry.transactional_id, value, identity)
        if refusal is not None:
            raise refusal
        if value.state is not State.ONGOING:
            raise decisions.fenced(entry.transactional_id)  # An attempt has one transaction.
        decisions.enlist(self._ledger, entry, value, event)

    def end(self, entry: Entry, event: EndTransaction) -> None:
        """Abort an attempt, or say that it was aborted."""
        if event.request.commit:
            raise InvalidRequestError(
                f"{entry.transactional_id!r} is an attempt, which is committed by CommitGroup of "
                f"its group {entry.subject!r}"
            )
        refusal = self._why_not_aborted(entry, decisions.identity_of(event))
        if refusal is not None:
            raise refusal
        # There is no next transaction to give an identity for.
        response = transactions_pb2.EndTransactionResponse(producer_id=-1, producer_epoch=-1)
        self._ledger.respond(entry.subject, event.request_id, response)

    def _why_not_aborted(self, entry: Entry, identity: Identity) -> PenstockError | None:
        """Abort what is open; why it is not aborted after that."""
        ledger, name, attempt = self._ledger, entry.transactional_id, entry.attempt
        assert attempt is not None
        value = ledger.ids.get(name)
        if value is None:
            return self._why_unknown(attempt, identity)
        if value.state is not State.ONGOING:
            if value.was_last(identity):
                return decisions.why_not_ended(name, value, commit=False)
            return decisions.foreign(name, value, identity)
        if identity != value.identity:
            return decisions.foreign(name, value, identity)
        if ledger.won(attempt, identity.producer_id):
            return _committed(name)
        if not ledger.is_decided_by_group(attempt):
            decisions.decide(ledger, entry, commit=False, cause=Cause.PRODUCER)
        return None

    def _why_unknown(self, attempt: Attempt, identity: Identity) -> PenstockError | None:
        """Why an attempt that was forgotten, since it ended, is not said to be aborted."""
        if self._ledger.won(attempt, identity.producer_id):
            return _committed(attempt.transactional_id)
        commit = self._ledger.commits.get(attempt.group)
        if commit is not None and attempt.epoch_number < commit.epoch_number:
            return InvalidTxnStateError(
                f"{attempt.transactional_id!r} has ended; who won at its epoch number is not known "
                f"any more, since group {attempt.group!r} has committed {commit.epoch_number}"
            )
        return None

    def due(self, entry: Entry) -> None:
        """Do what time has come for: abort what nobody has committed in time, or forget."""
        ledger = self._ledger
        value = ledger.ids.get(entry.transactional_id)
        if value is None:
            return
        if entry.outcome is None:
            if entry.expires_ms <= ledger.now_ms:
                decisions.decide(ledger, entry, commit=False, cause=Cause.COORDINATOR)
        elif entry.is_done and self._expires_ms(value.updated_ms) <= ledger.now_ms:
            self._forget(entry)

    def deadline_ms(self, entry: Entry) -> int | None:
        """When :meth:`due` has something to do."""
        value = self._ledger.ids.get(entry.transactional_id)
        if value is None or entry.is_ending:
            return None
        if entry.outcome is not None:
            return self._expires_ms(value.updated_ms)
        assert entry.attempt is not None
        if self._ledger.is_decided_by_group(entry.attempt):
            return None  # It is one of the unsettled, which have their group's deadline.
        return entry.expires_ms

    def _expires_ms(self, updated_ms: int) -> int:
        """When what nobody used since is forgotten.

        An attempt that has ended, though its group has not decided; a group after its last commit.
        """
        ledger = self._ledger
        idle_ms = ledger.wall_ms - updated_ms
        return ledger.now_ms + max(ledger.settings.id_expiration_ms - idle_ms, 0)

    def forget_if_done(self, entry: Entry) -> None:
        """Forget an attempt whose marks are all there, and whose number is decided."""
        assert entry.attempt is not None
        if entry.is_done and self._ledger.is_decided_by_group(entry.attempt):
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._ledger.put(entry, None)
        self._ledger.settle(entry)

    # ------------------------------------------------------------------ groups

    def commit(self, event: CommitGroup) -> None:
        """Decide about all attempts of a group up to an epoch number, in one record."""
        request, ledger = event.request, self._ledger
        winners = winners_of(request)
        group = ledger.group(request.group)
        last = ledger.commits.get(group.name)
        if last is not None and request.epoch_number <= last.epoch_number:
            self._replay(event, last, winners)
            return
        if self.is_held_up(group):
            # The record of this commit will not say any more how they end.
            group.waiting.append(event)
            return
        for winner in winners:
            self._check_winner(_named(group.name, request.epoch_number, winner), winner)
        commit = GroupCommit(
            request.epoch_number, winners, ledger.wall_ms, request.ends_group, request.metadata
        )
        ledger.put_group(group.name, commit)
        group.unsettled.extend(sorted(group.attempts))
        self.settle_some(group)
        ledger.respond(group.name, event.request_id, event.answer())

    def loaded(self, group: Group) -> None:
        """Take up what is known of a group from its records."""
        decided = []
        for name in sorted(group.attempts):
            entry = self._ledger.entry(name)
            assert entry.attempt is not None
            if self._ledger.is_decided_by_group(entry.attempt):
                decided.append(name)
            else:
                self._ledger.settle(entry)
        group.unsettled.extend(decided)
        self.settle_some(group)

    def group_due(self, group: Group) -> None:
        """Do what time has come for: settle some more, and forget a group that has ended."""
        group.retry_ms = None
        self.settle_some(group)
        expires_ms = self._group_expires_ms(group)
        if expires_ms is not None and expires_ms <= self._ledger.now_ms:
            self._ledger.put_group(group.name, None)

    def group_deadline_ms(self, group: Group) -> int | None:
        """When :meth:`group_due` has something to do."""
        if group.unsettled:
            return self._ledger.now_ms
        expires_ms = self._group_expires_ms(group)
        if expires_ms is None or group.retry_ms is None:
            return expires_ms
        return max(expires_ms, group.retry_ms)

    def _group_expires_ms(self, group: Group) -> int | None:
        """When a group is forgotten; None for one that may go on, or that has attempts."""
        last = self._ledger.commits.get(group.name)
        if last is None or not last.ends_group or group.attempts:
            return None
        return self._expires_ms(last.committed_ms)

    def settle_some(self, group: Group) -> None:
        """Have marks sent for attempts that the last commit has decided about.

        The record alone says how they end, and whatever is asked about one settles it first. So the
        others may wait: for the group's deadline, which is now while there are any.
        """
        for _ in range(min(len(group.unsettled), self._ledger.settings.settled_at_once)):
            name = group.unsettled.popleft()
            if name in group.attempts:
                self._ledger.settle(self._ledger.entry(name))

    def _replay(self, event: CommitGroup, last: GroupCommit, winners: tuple[Winner, ...]) -> None:
        request = event.request
        if request.epoch_number < last.epoch_number:
            raise StaleGroupCommitError(
                f"group {request.group!r} has committed epoch number {last.epoch_number}; "
                f"{request.epoch_number} comes too late, as from an old checkpoint"
            )
        if not last.is_for(winners):
            others = ", ".join(
                f"{_named(request.group, last.epoch_number, winner)!r} of producer "
                f"{winner.producer_id}"
                for winner in last.winners[:10]
            )
            others = others or "none"
            more = f" and {len(last.winners) - 10} more" if len(last.winners) > 10 else ""
            raise GroupCommitConflictError(
                f"group {request.group!r} has committed epoch number {last.epoch_number} with "
                f"other winners: {others}{more}; what these wrote is there, and nothing else"
            )
        self._ledger.respond(request.group, event.request_id, event.answer(is_replay=True))

    def _check_winner(self, name: str, winner: Winner) -> None:
        value = self._ledger.ids.get(name)
        if value is None or value.state is not State.ONGOING:
            raise UnknownAttemptError(
                f"attempt {name!r} is not open: it did not begin, or was aborted, as by its "
                "timeout; nothing was decided"
            )
        if value.producer_id != winner.producer_id:
            raise UnknownAttemptError(
                f"attempt {name!r} is that of producer {value.producer_id} now; that of producer "
                f"{winner.producer_id} ended when this one began, if it ever did begin; nothing "
                "was decided"
            )

    def is_held_up(self, group: Group) -> bool:
        """Whether attempts that the last commit decided about have not ended yet."""
        last = self._ledger.commits.get(group.name)
        return last is not None and any(self._is_undone(name, last) for name in group.attempts)

    def _is_undone(self, name: str, last: GroupCommit) -> bool:
        """Whether an attempt was decided by its group's last commit, and has not ended yet."""
        attempt = parse_attempt(name)
        assert attempt is not None
        is_open = self._ledger.ids[name].state is State.ONGOING
        return is_open and attempt.epoch_number <= last.epoch_number


def _named(group: str, epoch_number: int, winner: Winner) -> str:
    """The id of a winner's transaction."""
    return Attempt(group, epoch_number, winner.task, winner.attempt).transactional_id


def _committed(transactional_id: str) -> PenstockError:
    return InvalidTxnStateError(f"{transactional_id!r} was committed by its group, and stays so")
