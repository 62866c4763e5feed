"""What lies under a path of an object store, and how much of it a reader has read. Opens nothing.

There are batches of ``ParquetBatches``, ``batch-0000000012/`` with what their marker names, and
other Parquet objects. A reader is behind a batch by its number, and behind others by their names:
whatever either kind is called, it hides nothing of the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from penstock.pipeline.errors import ConnectorError, OptionError

MARKER: Final = "_committed.json"
_BATCH: Final = re.compile(r"batch-([0-9]{10})")

PartsOf = Callable[[int], Collection[str] | None]
"""The names that a batch's marker has, asked of the store; None where there is no marker."""
Lost = Callable[[str], None]
"""Told of what will never be read. Raises, or has it passed over."""


def directory_of(batch_id: int) -> str:
    """Where a batch is, under its path."""
    return f"batch-{batch_id:010d}"


def check_path(path: str, where: str) -> None:
    """Raises OptionError for the path of a single batch, which tells nothing of its commit."""
    parent, _, name = path.rpartition("/")
    if _BATCH.fullmatch(name):
        raise OptionError(f"{where}: path={path} is one batch of those under {parent}; name that")


@dataclass(frozen=True, slots=True)
class Position:
    """How much is read: of the batches all before ``batch``, and of that one its parts up to
    ``part``; of the other objects those up to ``other``, of which there were ``others`` then.

    ``objects`` is how many lie between the position before and this one.
    """

    batch: int = -1
    """-1 before the first one, whichever it is."""
    part: str = ""
    other: str = ""
    others: int = 0
    objects: int = 0

    @classmethod
    def of(cls, offset: dict[str, Any]) -> Position:
        """From an offset, as Spark keeps it in a checkpoint. Raises ConnectorError."""
        try:
            return cls(**offset)
        except TypeError as error:
            raise ConnectorError(
                f"the checkpoint has an offset {offset}, as builds of Penstock before its release "
                "wrote it; next: begin with a new checkpoint"
            ) from error

    @property
    def offset(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is, by names relative to the path."""

    batches: dict[int, bool]
    """By number, in their order: whether the batch is committed."""
    parts: frozenset[str]
    """All that lies in batches, as ``batch-0000000012/part-00000.parquet``."""
    others: tuple[str, ...]
    """Parquet objects that are of no batch, in the order of their names."""

    @classmethod
    def of(cls, names: Iterable[str], where: str) -> Listing:
        """From the names of all objects. Raises OptionError for paths that have paths of batches
        below: of these nobody could say how they are ordered.
        """
        batches: dict[int, bool] = {}
        parts, others = set(), []
        for name in sorted(names):
            first, *rest = name.split("/")
            if rest and (found := _BATCH.fullmatch(first)):
                number = int(found[1])
                batches[number] = batches.get(number, False) or rest == [MARKER]
                parts.add(name)
            elif any(_BATCH.fullmatch(each) for each in rest[:-1]):
                raise OptionError(
                    f"{where}: there are batches below path, as {name}; next: read each path that "
                    "has batches by itself"
                )
            elif name.endswith(".parquet") and not any(
                each.startswith(("_", ".")) for each in (first, *rest)
            ):
                others.append(name)
        return cls(batches, frozenset(parts), tuple(others))

    def within(self, bound: Listing) -> Listing:
        """Without what comes after all that is in ``bound``."""
        last = max(bound.batches, default=-1)
        after = bound.others[-1] if bound.others else ""
        return Listing(
            {number: done for number, done in self.batches.items() if number <= last},
            self.parts,
            tuple(name for name in self.others if name <= after),
        )

    def plan(self, start: Position, most: int | None, parts_of: PartsOf, lost: Lost) -> Position:
        """Where a batch of Spark's that begins at ``start`` ends, with at most so many objects:
        those of batches first.
        """
        late = sum(name <= start.other for name in self.others) - start.others
        if late > 0:
            lost(f"{late} objects came whose names are not after {start.other}, the last one read")
        end, count = start, 0
        for batch, part, name in self._unread_parts(start, parts_of, lost):
            if name is not None and count == most:
                break
            count += name is not None
            end = dataclasses.replace(end, batch=batch, part=part)
        new = [name for name in self.others if name > start.other]
        new = new if most is None else new[: most - count]
        if new:
            end = dataclasses.replace(end, other=new[-1])
        if end == start:
            return start
        others = sum(name <= end.other for name in self.others)
        return dataclasses.replace(end, others=others, objects=count + len(new))

    def between(self, start: Position, end: Position, parts_of: PartsOf, lost: Lost) -> list[str]:
        """The objects of a batch of Spark's, as they were planned."""
        if start == end:
            return []
        old = {number: done for number, done in self.batches.items() if number <= end.batch}
        unread = dataclasses.replace(self, batches=old)._unread_parts(start, parts_of, lost)
        found = [
            name
            for batch, part, name in unread
            if name is not None and (batch, part) <= (end.batch, end.part)
        ]
        found += [name for name in self.others if start.other < name <= end.other]
        if len(found) != end.objects:
            lost(f"there are {len(found)} objects of the {end.objects} that were planned")
        return found

    def _unread_parts(
        self, start: Position, parts_of: PartsOf, lost: Lost
    ) -> Iterator[tuple[int, str, str | None]]:
        """The objects of batches, with how far one is behind them: batch and part. Without an
        object where a batch has none.
        """
        for number in self._ready(start.batch, parts_of, lost):
            parts = sorted(parts_of(number) or ())
            if number == start.batch:
                parts = [part for part in parts if part > start.part]
            places = [(number, part) for part in parts[:-1]] + [(number + 1, "")]
            for part, place in zip_longest(parts, places):
                name = part and f"{directory_of(number)}/{part}"
                if name is not None and name not in self.parts:
                    lost(f"object {name} is gone, which its batch names")
                    name = None
                yield *place, name

    def _ready(self, first: int, parts_of: PartsOf, lost: Lost) -> Iterator[int]:
        """The batches from ``first`` on that can be read: batches come one after the other, so that
        nothing behind one that is not committed is complete.
        """
        newest = max((number for number, done in self.batches.items() if done), default=-1)
        for number in sorted(self.batches):
            if number < first:
                continue
            if 0 <= first < number:
                if parts_of(first) is not None:
                    return  # It was not there yet when that part of the listing was made.
                lost(f"batches {first} to {number - 1} are gone, though batch {number} is there")
            first = number + 1
            if self.batches[number]:
                yield number
            elif number > newest or parts_of(number) is not None:
                return
            else:
                lost(f"batch {number} is not committed, though batch {newest} is")
