"""What bench/transaction_soak.py proves: of a transaction all is read or nothing, and once. Pure.

A writer's transaction has ``size`` values, ``WRITER NUMBER PLACE``. Its writer knows that it was
committed, or aborted, or (killed in its midst) does not know: then all of it may be there or
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_ABORTED_OF: Final = 10
_MOST_EXAMPLES: Final = 5


def is_to_abort(number: int) -> bool:
    """Whether the writer aborts the transaction, though nothing is wrong with it."""
    return number % _ABORTED_OF == 7


def value_of(writer: str, number: int, place: int) -> bytes:
    """One value of a transaction."""
    return f"{writer} {number} {place}".encode()


@dataclass(slots=True)
class Notes:
    """What a writer noted: its transactions by number."""

    begun: int = 0  # So many were begun, numbered from 0.
    committed: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)

    @property
    def next_number(self) -> int:
        """The number of the transaction that is to be begun next."""
        return self.begun

    @property
    def unknown(self) -> int:
        """Of so many transactions the writer did not learn the outcome."""
        return self.begun - len(self.committed) - len(self.aborted)


def read_notes(text: str) -> Notes:
    """What the lines of a writer's file say; a last line that is cut off counts for nothing."""
    notes = Notes()
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        what, _, number = line.rstrip("\n").partition(" ")
        if what == "begun":
            notes.begun = max(notes.begun, int(number) + 1)
        elif what == "committed":
            notes.committed.add(int(number))
        else:
            notes.aborted.add(int(number))
    return notes


@dataclass(slots=True)
class Read:
    """How often each place of each transaction was read."""

    size: int
    seen: dict[tuple[str, int], bytearray] = field(default_factory=dict)
    strange: int = 0
    count: int = 0

    def add(self, values: Iterable[bytes]) -> None:
        """Count values."""
        for value in values:
            self.count += 1
            try:
                writer, number, place = value.decode().split(" ")
                places = self.seen.setdefault((writer, int(number)), bytearray(self.size))
                places[int(place)] = min(places[int(place)] + 1, 255)
            except (ValueError, IndexError):
                self.strange += 1


@dataclass(slots=True)
class Verdict:
    """What was found; every count but ``committed``, ``aborted`` and ``unknown*`` must be 0."""

    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    unknown_committed: int = 0
    lost: int = 0  # Committed, and nothing of it is read.
    torn: int = 0  # A part of it is read.
    doubled: int = 0  # Something of it is read more than once.
    aborted_read: int = 0  # Aborted, and something of it is read.
    foreign: int = 0  # Nobody wrote it.
    examples: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What does not hold, in words."""
        names = ("lost", "torn", "doubled", "aborted_read", "foreign")
        return [f"{name}: {getattr(self, name):,}" for name in names if getattr(self, name)]

    def _tell(self, what: str, transaction: tuple[str, int], places: bytes) -> None:
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(f"{what}: {transaction[0]} {transaction[1]} {places.hex(' ')}")


def judge(notes: dict[str, Notes], read: Read) -> Verdict:
    """Compare what is read with what the writers know."""
    verdict = Verdict(foreign=read.strange)
    for writer, noted in notes.items():
        verdict.committed += len(noted.committed)
        verdict.aborted += len(noted.aborted)
        verdict.unknown += noted.unknown
        for number in range(noted.begun):
            places = read.seen.get((writer, number), bytes(read.size))
            _judge_one(verdict, noted, (writer, number), bytes(places))
    for writer, number in read.seen:
        if writer not in notes or number >= notes[writer].begun:
            verdict.foreign += 1
    return verdict


def _judge_one(verdict: Verdict, noted: Notes, transaction: tuple[str, int], places: bytes) -> None:
    number = transaction[1]
    some, every = any(places), all(places)
    if max(places) > 1:
        verdict.doubled += 1
        verdict._tell("doubled", transaction, places)
    if number in noted.aborted:
        if some:
            verdict.aborted_read += 1
            verdict._tell("aborted and read", transaction, places)
    elif some and not every:
        verdict.torn += 1
        verdict._tell("torn", transaction, places)
    elif number in noted.committed and not some:
        verdict.lost += 1
        verdict._tell("lost", transaction, places)
    elif number not in noted.committed and every:
        verdict.unknown_committed += 1


def differences(source: Read, target: Read) -> Counter[str]:
    """How what was processed differs from what there was to process: each value once."""
    found: Counter[str] = Counter()
    for transaction in source.seen.keys() | target.seen.keys():
        wanted = source.seen.get(transaction, bytes(source.size))
        got = target.seen.get(transaction, bytes(source.size))
        for want, have in zip(wanted, got, strict=True):
            if have < want:
                found["unprocessed"] += want - have
            elif have > want:
                found["processed_twice"] += have - want
    return found
