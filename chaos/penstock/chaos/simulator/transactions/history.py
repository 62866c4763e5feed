"""What happened to transactions in a run, in the order in which it did, for checkers to judge.

Three sources: what clients did and were told, what is committed in the coordinators' log, and what
readers were given. The place of an event in the history is its time.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from penstock.chaos.simulator.transactions.positions import Moves, PositionTold
from penstock.wire.ids import TopicIdPartition

_E = TypeVar("_E")


class Identity(NamedTuple):
    """A producer id and an epoch: together they name one transaction."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Given:
    """A producer's instance was told that it has this identity for its next transaction."""

    transactional_id: str
    instance: bytes
    identity: Identity


@dataclass(frozen=True, slots=True)
class Taken:
    """The coordinators' log has, committed, that another instance has the id from now on."""

    transactional_id: str
    instance: bytes


@dataclass(frozen=True, slots=True)
class Began:
    """A producer begins to write a transaction. ``txn`` numbers the transactions of a run.

    ``attempt``: that of an engine's task, which a group's commit decides about.
    """

    txn: int
    transactional_id: str
    identity: Identity
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an engine's attempt is for. ``handle`` is what its driver has of it."""

    handle: str
    group: str
    epoch_number: int
    task: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A transaction's producer sends records for the first time. ``amounts``: what they move."""

    txn: int
    key: TopicIdPartition
    values: tuple[bytes, ...]
    amounts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A transaction's producer was told that all replicas have its records."""

    txn: int
    values: tuple[bytes, ...]
    offset: int = -1  # Of the first.


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a transaction writes was made out of these records, read as committed ones.

    ``group``: by a member of this group, which share the records; else by a process of its own.
    ``places``: where each was.
    """

    txn: int
    values: tuple[bytes, ...]
    group: str = ""
    places: tuple[tuple[TopicIdPartition, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EndAsked:
    """A producer asks for its transaction's end, or asks again."""

    txn: int
    commit: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A producer was told that its transaction is decided like that."""

    txn: int
    commit: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """The coordinators' log has, committed, how the transaction of an identity ends.

    ``kept``: the same record keeps partitions for the next one. ``lapsed``: this one had nothing
    but what was kept.
    """

    identity: Identity
    commit: bool
    kept: bool = False
    lapsed: bool = False


@dataclass(frozen=True, slots=True)
class GroupDecided:
    """The coordinators' log has, committed, which attempts won an epoch number of a group."""

    group: str
    epoch_number: int
    winners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupAsked:
    """A driver asks for an epoch number to be committed with these winners."""

    group: str
    epoch_number: int
    winners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupTold:
    """A driver was told that an epoch number is committed with its winners."""

    group: str
    epoch_number: int
    winners: tuple[str, ...]
    is_replay: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """A reader that asks for committed records only was given these."""

    reader: int
    key: TopicIdPartition
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """A partition is gone for good, with all that was written to it."""

    key: TopicIdPartition


Event = (
    Given
    | Taken
    | Began
    | Sent
    | Acknowledged
    | Consumed
    | EndAsked
    | Ended
    | Decided
    | GroupDecided
    | GroupAsked
    | GroupTold
    | Seen
    | Deleted
    | Moves
    | PositionTold
)


@dataclass(slots=True)
class Transaction:
    """One transaction as its producer knows it. ``told`` is how it was said to end, if it was."""

    number: int
    identity: Identity
    transactional_id: str
    attempt: Attempt | None
    sent: dict[bytes, TopicIdPartition] = field(default_factory=dict)
    amounts: dict[bytes, int] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)
    consumed: list[bytes] = field(default_factory=list)
    asked: set[bool] = field(default_factory=set)
    told: bool | None = None

    def __str__(self) -> str:
        who = self.transactional_id if self.attempt is None else self.attempt.handle
        producer_id, epoch = self.identity
        return f"transaction {self.number} of {who} (producer {producer_id}, epoch {epoch})"


class Decision(NamedTuple):
    """How a transaction ends, and when that was committed."""

    at: int
    commit: bool


class History:
    """The events of a run. Only ``note`` changes it."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        for event in events:
            self.note(event)

    def note(self, event: Event) -> None:
        """Something happened after all that is here."""
        self.events.append(event)
        self.__dict__.pop("transactions", None)
        self.__dict__.pop("writers", None)

    @cached_property
    def transactions(self) -> Mapping[int, Transaction]:
        """The transactions by their numbers."""
        found: dict[int, Transaction] = {}
        for event in self.events:
            match event:
                case Began(txn, transactional_id, identity, attempt):
                    found[txn] = Transaction(txn, identity, transactional_id, attempt)
                case Sent(txn, key, values, amounts):
                    found[txn].sent.update(dict.fromkeys(values, key))
                    found[txn].amounts.update(zip(values, amounts, strict=False))
                case Acknowledged(txn, values, _):
                    found[txn].acknowledged.update(values)
                case Consumed(txn, values, _, _):
                    found[txn].consumed += values
                case EndAsked(txn, commit):
                    found[txn].asked.add(commit)
                case Ended(txn, commit):
                    found[txn].told = commit
                case _:
                    pass
        return found

    @cached_property
    def writers(self) -> Mapping[bytes, Transaction]:
        """By record value the transaction that wrote it. Values are unique in a run."""
        return {value: txn for txn in self.transactions.values() for value in txn.sent}

    def deleted(self) -> set[TopicIdPartition]:
        """The partitions that are gone: what was written to them is nowhere."""
        return {event.key for _, event in self.of_kind(Deleted)}

    def promised(self) -> Mapping[int, set[bytes]]:
        """By transaction number what was acknowledged of it, in partitions that are still there."""
        gone = self.deleted()
        return {
            number: {value for value in txn.acknowledged if txn.sent[value] not in gone}
            for number, txn in self.transactions.items()
        }

    def of_kind(self, kind: type[_E]) -> Iterator[tuple[int, _E]]:
        """The events of a kind, and when they were."""
        for at, event in enumerate(self.events):
            if isinstance(event, kind):
                yield at, event

    def totals(self) -> Counter[str]:
        """What happened, in figures."""
        decisions = self.decisions()
        found: Counter[str] = Counter()
        for txn in self.transactions.values():
            decision = decisions.get(txn.number)
            how = "undecided" if decision is None else "committed" if decision.commit else "aborted"
            what = "transactions" if txn.attempt is None else "attempts"
            found[f"{what} {how}"] += 1
            found["outcomes never told"] += txn.told is None and True in txn.asked
            found["transactions aborted against a wish"] += txn.told is False and True in txn.asked
        for _, told in self.of_kind(GroupTold):
            found["group commits told"] += 1
            found["group commits told again"] += told.is_replay
        for _, position in self.of_kind(PositionTold):
            found["positions told"] += 1
            found["positions told that are stable"] += position.stable
        for _, moves in self.of_kind(Moves):
            decision = decisions.get(moves.txn)
            found["positions committed"] += decision is not None and decision.commit
            found["positions aborted"] += decision is not None and not decision.commit
        found["group commits"] = sum(1 for _ in self.of_kind(GroupDecided))
        found["decisions that kept"] = sum(one.kept for _, one in self.of_kind(Decided))
        found["kept and lapsed"] = sum(one.lapsed for _, one in self.of_kind(Decided))
        found["identities given"] = sum(1 for _ in self.of_kind(Given))
        return +found

    def decisions(self) -> Mapping[int, Decision]:
        """By transaction number the first decision about it that was ever committed.

        An attempt's is that of its group where that came first: one record decides all attempts up
        to its epoch number.
        """
        by_identity: dict[Identity, list[Transaction]] = {}
        by_group: dict[str, list[Transaction]] = {}
        for txn in self.transactions.values():
            by_identity.setdefault(txn.identity, []).append(txn)
            if txn.attempt is not None:
                by_group.setdefault(txn.attempt.group, []).append(txn)
        found: dict[int, Decision] = {}
        for at, event in enumerate(self.events):
            if isinstance(event, Decided):
                for txn in by_identity.get(event.identity, ()):
                    found.setdefault(txn.number, Decision(at, event.commit))
            elif isinstance(event, GroupDecided):
                for txn in by_group.get(event.group, ()):
                    assert txn.attempt is not None
                    if txn.attempt.epoch_number <= event.epoch_number:
                        won = txn.attempt.handle in event.winners
                        found.setdefault(txn.number, Decision(at, won))
        return found


class Kind(enum.Enum):
    """What a batch of a log is."""

    PLAIN = "plain"
    DATA = "transactional"
    COMMIT = "commit mark"
    ABORT = "abort mark"


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A batch of a partition's committed log."""

    base_offset: int
    next_offset: int
    identity: Identity
    kind: Kind
    values: tuple[bytes, ...] = ()


Logs = Mapping[TopicIdPartition, Sequence[LoggedBatch]]
"""The committed log of every partition that clients write to."""
