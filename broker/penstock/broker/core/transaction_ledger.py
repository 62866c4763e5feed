"""What is known of the transactions of one partition, and every change to it.

The durable state is exactly what the records say. It changes by ``put`` and ``put_group`` alone,
which ask for the record and note how to take it back, by ``replay``, and by ``undo``; so replaying
all records gives the same state, and undoing the last ones gives the state before them. Beside it
is what a load finds out anew: which marks are not there yet, and who waits for what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_codec import ReplayedId
from penstock.broker.core.transaction_events import (
    Change,
    Effect,
    KnownTopics,
    Mark,
    Persist,
    Request,
    Respond,
    SendMarks,
    TakeProducerId,
    TransactionSettings,
)
from penstock.broker.core.transaction_values import (
    NO_PARTICIPANTS,
    UNKNOWN_PRODUCER,
    Cause,
    GroupCommit,
    Outcome,
    Participant,
    Participants,
    State,
    Transaction,
    Winner,
)
from penstock.wire.errors import PenstockError
from penstock.wire.transactional_ids import Attempt, parse_attempt


class NoSpareProducerIdError(Exception):
    """A producer id is needed, and has been asked for: what needs it is to be handled again."""


@dataclass(slots=True, eq=False)
class Entry:
    """A transactional id, or an attempt, beside what its record says."""

    transactional_id: str
    attempt: Attempt | None
    subject: str
    """What records and answers are about: the attempts of a group are one with it."""
    outcome: Outcome | None = None
    """How its transaction ends; None while none is decided."""
    missing: set[Participant] = field(default_factory=set)
    """Where the marks of that are not there yet."""
    behind: set[Participant] = field(default_factory=set)
    """Those of them where the mark of the transaction before is not there, and goes first."""
    waiting: list[Request] = field(default_factory=list)
    """Who waits for these marks, in order."""
    note_ms: int = 0
    """When to write down that all marks are there."""
    retry_ms: int | None = None
    """When to try again what could not be done."""
    opened: int | None = None
    """The deadline, by the wall clock, that ``expires_ms`` is about."""
    expires_ms: int = 0
    """When the open transaction is aborted."""

    @property
    def is_ending(self) -> bool:
        """Whether marks are on their way."""
        return bool(self.missing)

    @property
    def is_done(self) -> bool:
        """Whether a transaction was decided, and all of its marks are there."""
        return self.outcome is not None and not self.missing


@dataclass(slots=True, eq=False)
class Group:
    """A group of attempts beside what its record says."""

    name: str
    attempts: set[str] = field(default_factory=set)
    """The ids of those that have a record."""
    waiting: list[Request] = field(default_factory=list)
    """Commits that wait for attempts of the last one to end."""
    unsettled: deque[str] = field(default_factory=deque)
    """Attempts that the last commit has decided, and that ``settle`` has not looked at since."""
    retry_ms: int | None = None
    """When to try again to forget it, which could not be written."""


class Ledger:
    """The transactional ids and groups of one partition, and what the event at hand asks for."""

    def __init__(self, topics: KnownTopics, settings: TransactionSettings) -> None:
        self.settings: Final = settings
        self._topics = topics
        self._ids: dict[str, Transaction] = {}
        self._commits: dict[str, GroupCommit] = {}
        self._winners: dict[str, frozenset[Winner]] = {}  # By group, of the last commit.
        self._entries: dict[str, Entry] = {}
        self._groups: dict[str, Group] = {}
        self._spare_ids: list[int] = []
        self._effects: list[Effect] = []
        self._clock_offset_ms = 0  # From the monotonic clock to the wall clock.
        self.now_ms = 0
        self.touched: dict[str, Entry | Group] = {}
        """Whose deadline may be another now."""
        self.ending: set[str] = set()
        """The ids of those whose marks are on their way."""

    # ------------------------------------------------------------------ reading

    @property
    def ids(self) -> Mapping[str, Transaction]:
        """What the records say, by transactional id."""
        return self._ids

    @property
    def commits(self) -> Mapping[str, GroupCommit]:
        """The last commits, by group."""
        return self._commits

    @property
    def wall_ms(self) -> int:
        """The wall clock at the event at hand."""
        return self.now_ms + self._clock_offset_ms

    def entries(self) -> Iterator[Entry]:
        """All entries, by id."""
        return iter([self._entries[name] for name in sorted(self._entries)])

    def groups(self) -> Iterator[Group]:
        """All groups of attempts, by name."""
        return iter([self._groups[name] for name in sorted(self._groups)])

    def known(self, transactional_id: str) -> Entry | None:
        """The entry, to be looked at only; None where there is none."""
        return self._entries.get(transactional_id)

    def entry(self, transactional_id: str) -> Entry:
        """The entry; one of an id without a record is forgotten after the event."""
        entry = self._entries.get(transactional_id)
        if entry is None:
            attempt = parse_attempt(transactional_id)
            subject = transactional_id if attempt is None else attempt.group
            entry = self._entries[transactional_id] = Entry(transactional_id, attempt, subject)
        self.touched[f"i{transactional_id}"] = entry
        return entry

    def group(self, name: str) -> Group:
        """The group of attempts, as above."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name)
        self.touched[f"g{name}"] = group
        return group

    def is_decided_by_group(self, attempt: Attempt) -> bool:
        """Whether the attempt's group has committed its epoch number, or a higher one."""
        commit = self._commits.get(attempt.group)
        return commit is not None and attempt.epoch_number <= commit.epoch_number

    def present(self, entry: Entry) -> Transaction | None:
        """What is so: as the record says, but that what was kept is open once all marks are there.

        That needs no record of its own: whoever loads this one sends the marks again, and then
        comes to the same.
        """
        value = self._ids.get(entry.transactional_id)
        if value is not None and value.kept and value.is_decided and entry.is_done:
            return value.continued()
        return value

    # ------------------------------------------------------------------ the event at hand

    def begin(self, now_ms: int, wall_ms: int | None = None) -> None:
        """An event comes; ``wall_ms`` where it says what the wall clock shows."""
        self.now_ms = now_ms
        if wall_ms is not None:
            self._clock_offset_ms = wall_ms - now_ms

    def take_effects(self) -> list[Effect]:
        """What the event asks for."""
        effects, self._effects = self._effects, []
        return effects

    def take_touched(self) -> dict[str, Entry | Group]:
        """Whose deadline may be another now, since the last call; those without a record go."""
        touched, self.touched = self.touched, {}
        for one in touched.values():
            if one.waiting:
                continue
            if isinstance(one, Entry):
                if one.transactional_id not in self._ids:
                    self._entries.pop(one.transactional_id, None)
                    self.ending.discard(one.transactional_id)
            elif not one.attempts and one.name not in self._commits:
                self._groups.pop(one.name, None)
        return touched

    def respond(self, subject: str | None, request_id: int, response: Any) -> None:
        """Answer a request."""
        self._effects.append(Respond(subject, request_id, response))

    def refuse(self, subject: str, request: Request, error: PenstockError) -> None:
        """Answer a request by an error."""
        self.respond(subject, request.request_id, request.answer(error=error.to_proto()))

    def producer_id(self) -> int:
        """A fresh producer id. Raises NoSpareProducerIdError, and then has asked for one."""
        if not self._spare_ids:
            self._effects.append(TakeProducerId())
            raise NoSpareProducerIdError
        return self._spare_ids.pop()

    @property
    def has_spare_id(self) -> bool:
        """Whether a producer id can be had now."""
        return bool(self._spare_ids)

    def add_spare_id(self, producer_id: int) -> None:
        """A producer id was given."""
        self._spare_ids.append(producer_id)

    # ------------------------------------------------------------------ changing

    def put(self, entry: Entry, value: Transaction | None) -> None:
        """Set what is known of a transactional id, or with None forget it."""
        name = entry.transactional_id
        record = None if value is None else transaction_codec.id_value(value)
        key = transaction_codec.id_key(name)
        change = Change(entry.subject, key, record, name, False, self._ids.get(name))
        self._effects.append(Persist(entry.subject, change))
        self._set(name, value)

    def put_group(self, name: str, value: GroupCommit | None) -> None:
        """Set a group's last commit, or with None forget it."""
        record = None if value is None else transaction_codec.group_value(value)
        key = transaction_codec.group_key(name)
        change = Change(name, key, record, name, True, self._commits.get(name))
        self._effects.append(Persist(name, change))
        self._set_group(name, value)

    def replay(self, key: bytes, value: bytes | None) -> bool:
        """Take over what a record says; False for a kind that this version does not know."""
        replayed = transaction_codec.decode(key, value)
        if replayed is None:
            return False
        if isinstance(replayed, ReplayedId):
            self._set(replayed.transactional_id, replayed.value)
        else:
            self._set_group(replayed.group, replayed.value)
        return True

    def undo(self, change: Change) -> None:
        """Take back a change; the newest first."""
        before = change.before
        if change.is_group:
            assert before is None or isinstance(before, GroupCommit)
            self._set_group(change.name, before)
        else:
            assert before is None or isinstance(before, Transaction)
            self._set(change.name, before)

    def _set(self, name: str, value: Transaction | None) -> None:
        if value is None:
            self._ids.pop(name, None)
        else:
            self._ids[name] = value
        entry = self.entry(name)
        if entry.attempt is None:
            return
        attempts = self.group(entry.attempt.group).attempts
        if value is None:
            attempts.discard(name)
        else:
            attempts.add(name)

    def _set_group(self, name: str, value: GroupCommit | None) -> None:
        if value is None:
            self._commits.pop(name, None)
            self._winners.pop(name, None)
        else:
            self._commits[name] = value
            self._winners[name] = frozenset(value.winners)
        self.group(name)

    # ------------------------------------------------------------------ marks

    def settle(self, entry: Entry) -> None:
        """Go by what the records say of how the transaction ends.

        Marks are asked for here: after the record that decides, and behind it. Only those that wait
        for the marks before them follow later (``go_on_behind``).
        A topic that does not exist is one that is gone, since no partition of one that is not known
        is taken into a transaction.
        """
        value = self._ids.get(entry.transactional_id)
        outcome = None if value is None else self._outcome(entry, value)
        if outcome == entry.outcome:
            return
        self.unsettle(entry)
        entry.outcome = outcome
        if value is None or outcome is None:
            return
        entry.missing = set(self.existing(value.partitions))
        entry.behind = entry.missing & value.carried
        entry.note_ms = self.now_ms + self.settings.note_after_ms
        if entry.missing:
            self.ending.add(entry.transactional_id)
            self._send(entry, value.last_outcome, frozenset(entry.behind))
            self._send(entry, outcome, frozenset(entry.missing - entry.behind), value.kept)

    def go_on_behind(self, entry: Entry, partitions: Participants) -> None:
        """The marks of the transaction before are there: send those that waited for them."""
        assert entry.outcome is not None
        free = frozenset(entry.behind & partitions)
        entry.behind -= free
        self._send(entry, entry.outcome, free)

    def _send(
        self,
        entry: Entry,
        outcome: Outcome,
        where: Participants,
        kept: Participants = NO_PARTICIPANTS,
    ) -> None:
        if where:
            mark = Mark(entry.transactional_id, *outcome, where, kept & where)
            self._effects.append(SendMarks(entry.subject, (mark,)))

    def note_expiry(self, entry: Entry) -> None:
        """Find out when the open transaction is aborted: by what the wall clock says of its start.

        That is never later than its timeout from now, whatever clocks of other brokers showed. Of
        what is only kept nobody knows when it began, or whether it did: that has the pause, too.
        """
        value = self._ids.get(entry.transactional_id)
        if value is not None and value.kept and value.is_decided:
            value = value.continued()  # It is open as well while marks are on their way.
        if value is None or value.state is not State.ONGOING:
            entry.opened = None
            return
        may_take_ms = self.may_take_ms(value)
        if entry.opened != value.start_ms + may_take_ms:
            entry.opened = value.start_ms + may_take_ms
            left_ms = entry.opened - self.wall_ms
            entry.expires_ms = self.now_ms + min(max(left_ms, 0), may_take_ms)

    def may_take_ms(self, value: Transaction) -> int:
        """How long after its start the open transaction is aborted."""
        return value.timeout_ms + (self.settings.kept_pause_ms if value.kept else 0)

    def unsettle(self, entry: Entry) -> None:
        """Forget which marks are there: they were perhaps never sent."""
        entry.outcome = None
        entry.missing = set()
        entry.behind = set()
        self.ending.discard(entry.transactional_id)

    def existing(self, participants: Participants) -> Participants:
        """Those whose topics the metadata have."""
        return frozenset(one for one in participants if self._topics.knows(one.topic_id))

    def unknown_topic(self, participants: Participants) -> str | None:
        """The name of a topic that the metadata do not have, or None."""
        for participant in participants:
            if not self._topics.knows(participant.topic_id):
                return participant.topic
        return None

    def won(self, attempt: Attempt, producer_id: int) -> bool:
        """Whether the last commit of its group is for the attempt that began with this id."""
        commit = self._commits.get(attempt.group)
        if commit is None or commit.epoch_number != attempt.epoch_number:
            return False
        winners = self._winners[attempt.group]
        named = Winner(attempt.task, attempt.attempt, producer_id)
        return named in winners or named._replace(producer_id=UNKNOWN_PRODUCER) in winners

    def _outcome(self, entry: Entry, value: Transaction) -> Outcome | None:
        if value.is_decided:
            return Outcome(value.producer_id, value.epoch, value.state is State.PREPARE_COMMIT)
        attempt = entry.attempt
        if attempt is None or not self.is_decided_by_group(attempt):
            return None
        won = self.won(attempt, value.producer_id)
        return Outcome(value.producer_id, value.epoch + 1, won)

    # ------------------------------------------------------------------ for tests

    def durable(self) -> tuple[dict[str, Transaction], dict[str, GroupCommit]]:
        """A copy of all that replay must bring back."""
        return dict(self._ids), dict(self._commits)

    def validate(self) -> None:
        """Assert what must hold between events."""
        attempts: dict[str, set[str]] = {}
        for name, value in self._ids.items():
            entry = self._entries[name]
            assert entry.transactional_id == name
            if entry.attempt is not None:
                attempts.setdefault(entry.attempt.group, set()).add(name)
                assert value.state is not State.EMPTY
            if value.state is State.EMPTY:
                assert not value.partitions
            if value.kept:
                self._validate_kept(entry, value)
            assert value.has_ended or not value.lapsed
            if value.carried:
                assert value.lapsed
                assert value.state is State.PREPARE_ABORT
                assert value.carried <= value.partitions
            assert entry.behind <= entry.missing
            if value.is_decided:
                assert value.has_ended
                assert value.epoch == value.last.epoch + 1 + value.lapsed
                assert (value.next_producer_id != -1) == (value.epoch == self.settings.last_epoch)
            else:
                assert value.epoch < self.settings.last_epoch
                assert value.next_producer_id == -1
            if entry.retry_ms is None and not self._is_unsettled(entry):
                assert entry.outcome == self._outcome(entry, value)
        assert attempts == {
            name: one.attempts for name, one in self._groups.items() if one.attempts
        }
        for name in self._entries.keys() - self._ids.keys():
            assert self._entries[name].waiting, f"{name} is remembered for nothing"

    def _is_unsettled(self, entry: Entry) -> bool:
        group = None if entry.attempt is None else self._groups.get(entry.attempt.group)
        return group is not None and entry.transactional_id in group.unsettled

    def _validate_kept(self, entry: Entry, value: Transaction) -> None:
        assert entry.attempt is None
        assert value.is_owned
        assert value.has_ended
        assert value.next_producer_id == -1, "kept for an identity of another producer id"
        if value.state is State.ONGOING:
            assert value.kept == value.partitions
        else:
            assert value.is_decided
            assert value.kept <= value.partitions
            assert value.last_cause is Cause.PRODUCER
