"""What a history says of records, as columns: made once, and looked at by many checkers.

Partitions, producers, transactions and readings have numbers here, which are places in their
lists of names. A **reading** is what one reader reads of one partition without moving: its
positions go up from record to record. It ends where the reader seeks, where its group's assignment
takes or gives the partition, and where nobody knows what a poll has done.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.chaos.checkers.spans import Column, Mask, on_line
from penstock.chaos.history import FINAL, History, Operation, Type

OUTCOMES: Final = {Type.OK: 0, Type.FAIL: 1, Type.INFO: 2}
OK, FAIL, INFO = 0, 1, 2
WEIGHTS: Final = {"all": 2, "-1": 2, "1": 1, "0": 0}
"""What an acknowledgement weighs, by what ``acks`` was."""
ACKS_ALL: Final = 2
NONE: Final = -1
NEVER: Final = 1 << 62
"""When an operation ends that was never answered."""


class Names:
    """Numbers for names."""

    def __init__(self) -> None:
        self._numbers: Final[dict[str, int]] = {}
        self.names: Final[list[str]] = []

    def number(self, name: str) -> int:
        """The name's; a new one where it is new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def find(self, name: str) -> int:
        """The name's; NONE where nobody has named it."""
        return self._numbers.get(name, NONE)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of records: equal places of the columns belong together.

    ``operation`` is a place in the history's operations, ``visit`` one in the visits; NONE where
    there is none.
    """

    partition: Column
    offset: Column
    producer: Column
    first: Column
    count: Column
    operation: Column
    visit: Column

    def __len__(self) -> int:
        return len(self.count)

    def where(self, mask: Mask | Column) -> Runs:
        """Those of the mask, or at these places."""
        return Runs(*(getattr(self, name)[mask] for name in self.__slots__))

    def beside(self, other: Runs) -> Runs:
        """These and those."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Runs(*(np.concatenate(pair) for pair in pairs))

    @property
    def start(self) -> Column:
        """Where each begins in its partition, on one line for all partitions."""
        return on_line(self.partition, self.offset)

    @property
    def end(self) -> Column:
        """Where each ends."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Visits:
    """What each answered poll said of each partition.

    ``asked`` is the position it began at, ``after`` the one it left; ``end`` is up to where it
    could have been read. NONE where it did not say.
    """

    operation: Column
    partition: Column
    reading: Column
    asked: Column
    after: Column
    end: Column
    committed: Mask
    """Whether the reader reads what is committed alone."""
    final: Mask

    def __len__(self) -> int:
        return len(self.operation)


@dataclass(frozen=True, slots=True)
class Records:
    """All of it. ``outcome``, ``weight``, ``transaction``, ``begun`` and ``ended`` are by the place
    of an append or a poll in the history's operations.
    """

    partitions: Names
    producers: Names
    transactions: Names
    readers: list[str]
    """Of each reading the process or member."""
    attempted: Runs
    """Offsets are NONE."""
    acknowledged: Runs
    given: Runs
    visits: Visits
    outcome: Column
    weight: Column
    transaction: Column
    begun: Column
    ended: Column
    unstable: frozenset[str]
    """Topics that were deleted, or tried to be: their partitions are left out."""
    lanes: Column
    """Each pair of a partition and a producer, in order."""

    @classmethod
    def of(cls, history: History) -> Records:
        """Those of a history."""
        return _Builder(history).build()

    def lane(self, runs: Runs) -> Column:
        """Of each run the number of its partition and producer together."""
        pairs = runs.partition * len(self.producers.names) + runs.producer
        return np.searchsorted(self.lanes, pairs)

    def numbers(self, runs: Runs) -> Column:
        """Where each run begins in the numbers of its producer in its partition, on one line."""
        return on_line(self.lane(runs), runs.first)

    def lane_names(self, lane: int) -> tuple[str, str]:
        """The partition and the producer."""
        partition, producer = divmod(int(self.lanes[lane]), len(self.producers.names))
        return self.partitions.names[partition], self.producers.names[producer]

    def strong(self, runs: Runs, *, faulty: bool) -> Runs:
        """Of what was acknowledged that which is promised to stay where it is.

        An acknowledgement of the leader alone promises nothing where leaders fail, and one with
        ``acks=0`` never does.
        """
        return runs.where(self.weight[runs.operation] >= (ACKS_ALL if faulty else 1))

    def weak_lanes(self) -> Mask:
        """By lane whether anything was written with fewer acknowledgements than all.

        Such producers have no idempotence: what they send again may come twice and out of order.
        """
        weak = np.zeros(len(self.lanes), np.bool_)
        appends = self.attempted
        weak[self.lane(appends)[self.weight[appends.operation] != ACKS_ALL]] = True
        return weak


def is_final(operation: Operation) -> bool:
    """Whether it was after everything was healed."""
    return operation.invoked.phase == FINAL


def partition_name(topic: str, entry: str | int) -> str:
    """``orders-3``, whichever way an entry says it."""
    return f"{topic}-{entry}" if isinstance(entry, int) else entry


def topic_of(partition: str) -> str:
    """The topic of ``orders-3``."""
    return partition.rpartition("-")[0]


class _Builder:
    def __init__(self, history: History) -> None:
        self._history: Final = history
        self._partitions, self._producers, self._transactions = Names(), Names(), Names()
        self._readings: Final = Names()
        self._readers: Final[list[str]] = []
        self._unstable: Final = frozenset(
            one.invoked.value["topic"] for one in history.of("delete")
        )
        self._attempted, self._acknowledged, self._given = array("q"), array("q"), array("q")
        self._visits: Final = array("q")
        count = len(history.operations)
        self._outcome, self._weight = array("b", bytes(count)), array("b", bytes(count))
        self._transaction, self._begun = array("i", [NONE]) * count, array("q", [0]) * count
        self._ended: Final = array("q", [0]) * count
        self._moves: Final = moves(history)
        self._move_all: Final = _lost_polls(history)

    def build(self) -> Records:
        doers: Mapping[str, Callable[[int, Operation], None]] = {
            "append": self._append,
            "poll": self._poll,
        }
        for place, operation in enumerate(self._history.operations):
            do = doers.get(operation.invoked.f)
            if do is not None:
                do(place, operation)
        attempted, given = _runs(self._attempted), _runs(self._given)
        producers = max(1, len(self._producers.names))
        lanes = np.unique(
            np.concatenate(
                [runs.partition * producers + runs.producer for runs in (attempted, given)]
            )
        )
        return Records(
            self._partitions,
            self._producers,
            self._transactions,
            self._readers,
            attempted,
            _runs(self._acknowledged),
            given,
            _visits(self._visits),
            _column(self._outcome, np.int8),
            _column(self._weight, np.int8),
            _column(self._transaction, np.int32),
            _column(self._begun, np.int64),
            _column(self._ended, np.int64),
            self._unstable,
            lanes,
        )

    def _append(self, place: int, operation: Operation) -> None:
        asked, completed = operation.invoked.value, operation.completed
        topic = asked["topic"]
        if topic in self._unstable:
            return
        partition = self._partitions.number(partition_name(topic, asked["partition"]))
        producer = self._producers.number(asked["producer"])
        self._outcome[place] = OUTCOMES[operation.type]
        self._weight[place] = WEIGHTS[str(asked.get("acks", "all"))]
        self._begun[place] = operation.invoked.t
        if "txn" in asked:
            self._transaction[place] = self._transactions.number(asked["txn"])
        self._attempted.extend(
            (partition, NONE, producer, asked["first"], asked["count"], place, NONE)
        )
        self._ended[place] = NEVER if completed is None else completed.t
        if completed is None or completed.type is not Type.OK:
            return
        for first, count, offset in (completed.value or {}).get("runs") or ():
            self._acknowledged.extend((partition, offset, producer, first, count, place, NONE))

    def _poll(self, place: int, operation: Operation) -> None:
        asked, completed = operation.invoked.value, operation.completed
        topic = asked["topic"]
        if completed is None or completed.type is not Type.OK or topic in self._unstable:
            return
        answer = completed.value or {}
        self._begun[place], self._ended[place] = operation.invoked.t, completed.t
        reader = asked.get("member") or operation.invoked.p
        before, after = asked.get("positions") or {}, answer.get("positions") or {}
        ends = answer.get("ends") or {}
        visits: dict[str | int, tuple[int, int]] = {}
        flags = (asked.get("isolation") == "read_committed", is_final(operation))

        def visit(entry: str | int) -> tuple[int, int]:
            name = partition_name(topic, entry)
            known = visits.get(name)
            if known is None:
                number = self._partitions.number(name)
                known = visits[entry] = visits[name] = (number, len(self._visits) // 8)
                moved = self._moved(reader, name, completed.t)
                # What was given to it anew within the poll was not read on from where it was.
                is_anew = moved != self._moved(reader, name, operation.invoked.t)
                asked_at = NONE if is_anew else before.get(name, NONE)
                places = (asked_at, after.get(name, NONE), ends.get(name, NONE))
                reading = self._reading(reader, name, moved)
                self._visits.extend((place, number, reading, *places, *flags))
            return known

        for entry in before:
            visit(entry)
        add, number_of = self._given.extend, self._producers.number
        for entry, offset, producer, first, count in answer.get("runs") or ():
            partition, number = visits.get(entry) or visit(entry)
            add((partition, offset, number_of(producer), first, count, place, number))
        for entry in after:
            visit(entry)

    def _moved(self, reader: str, partition: str, t: int) -> int:
        """How often its position had been moved by then."""
        moves = bisect_left(self._moves.get((reader, partition), ()), t)
        return moves + bisect_left(self._move_all.get(reader, ()), t)

    def _reading(self, reader: str, partition: str, moves: int) -> int:
        """The reading that follows so many moves."""
        number = self._readings.number(f"{reader}\0{partition}\0{moves}")
        if number == len(self._readers):
            self._readers.append(reader)
        return number


def moves(history: History) -> Mapping[tuple[str, str], list[int]]:
    """By reader and partition the times at which its position was moved."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in history.of("seek", "assigned", "revoked", "lost"):
        asked, t = one.invoked.value, one.invoked.t
        if one.invoked.f == "seek":
            name = partition_name(asked["topic"], asked["partition"])
            found[asked.get("member") or one.invoked.p, name].append(t)
        else:
            for entry in asked.get("partitions") or ():
                found[asked["member"], entry].append(t)
    return found


def _lost_polls(history: History) -> Mapping[str, list[int]]:
    """By reader the times of polls of which nobody knows what they have moved."""
    found: dict[str, list[int]] = defaultdict(list)
    for one in history.of("poll"):
        if one.type is Type.INFO:
            found[one.invoked.value.get("member") or one.invoked.p].append(one.invoked.t)
    return found


def _column(values: array[Any], kind: type[np.signedinteger[Any]]) -> Column:
    return np.frombuffer(values, kind) if len(values) else np.zeros(0, np.int64)


def _table(values: array[int], columns: int) -> Column:
    """Rows as columns, each of them in one piece."""
    return np.ascontiguousarray(_column(values, np.int64).reshape(-1, columns).T)


def _runs(values: array[int]) -> Runs:
    return Runs(*_table(values, 7))


def _visits(values: array[int]) -> Visits:
    table = _table(values, 8)
    return Visits(*table[:6], *(table[6:] != 0))
