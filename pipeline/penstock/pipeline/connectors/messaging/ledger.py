"""The messages that were handed to us and are not done with yet. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar

Tag = TypeVar("Tag")

_MOST_FINISHED: Final = 100_000


@dataclass(slots=True, eq=False)
class _Entry(Generic[Tag]):
    row: tuple[Any, ...]
    tag: Tag | None
    identity: Hashable | None


class Ledger(Generic[Tag]):
    """Messages in the order of their arrival, numbered from 0.

    A batch is a range of numbers. Once a batch was planned with a message the message stays here,
    under its number, until the batch is done: the same range gives the same rows again.

    A ``tag`` is what the broker wants to have back as the acknowledgement; None wants none. An
    ``identity`` is by what a message is known when it is delivered anew; None where it cannot be.
    Messages that have an identity have a tag.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry[Tag]] = deque()
        self._first = 0
        self._planned = 0
        # Those whose acknowledgement has nowhere to go since the connection is lost: delivered
        # anew they get their tag back.
        self._orphans: dict[Hashable, deque[_Entry[Tag]]] = {}
        # And those that were done with meanwhile: delivered anew they are only acknowledged.
        self._finished: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def end(self) -> int:
        """The number that the next message gets."""
        return self._first + len(self._entries)

    def arrive(
        self,
        row: tuple[Any, ...],
        tag: Tag | None,
        identity: Hashable | None = None,
        *,
        again: bool = False,
    ) -> bool:
        """Take in a message. False: it was done with before, and is to be acknowledged at once.

        ``again`` says that the broker has delivered it before, to us or to another.
        """
        if again and identity is not None:
            if waiting := self._orphans.get(identity):
                waiting.popleft().tag = tag
                if not waiting:
                    del self._orphans[identity]
                return True
            if identity in self._finished:
                self._finished[identity] -= 1
                if not self._finished[identity]:
                    del self._finished[identity]
                return False
        self._entries.append(_Entry(row, tag, identity))
        return True

    def plan(self, start: int, most: int | None) -> int:
        """Where a batch that begins at ``start`` ends, having at most so many messages."""
        end = self.end if most is None else min(self.end, start + most)
        self._planned = max(self._planned, end)
        return end

    def rows(self, start: int, end: int) -> list[tuple[Any, ...]]:
        """Of a batch that is not done. Raises IndexError where it is, or never was planned."""
        if not self._first <= start <= end <= self.end:
            raise IndexError(f"{start} to {end} of {self._first} to {self.end}")
        part = islice(self._entries, start - self._first, end - self._first)
        return [entry.row for entry in part]

    def done(self, upto: int) -> list[Tag]:
        """Forget what is before this number, and return the tags to acknowledge, in order."""
        tags = []
        while self._first < min(upto, self._planned):
            entry = self._entries.popleft()
            self._first += 1
            if entry.tag is not None:
                tags.append(entry.tag)
            elif entry.identity is not None:
                self._finish(entry, entry.identity)
        return tags

    def _finish(self, entry: _Entry[Tag], identity: Hashable) -> None:
        waiting = self._orphans[identity]
        waiting.remove(entry)
        if not waiting:
            del self._orphans[identity]
        self._finished[identity] = self._finished.get(identity, 0) + 1
        if len(self._finished) > _MOST_FINISHED:
            self._finished.popitem(last=False)

    def lost(self, *, keep: bool) -> None:
        """The connection is gone, and the tags with it; the broker delivers all of it anew.

        What no batch was planned with is forgotten, unless it is to be kept: it comes again.
        """
        while not keep and self.end > self._planned:
            self._entries.pop()
        self._orphans = {}
        for entry in self._entries:
            entry.tag = None
            if entry.identity is not None:
                self._orphans.setdefault(entry.identity, deque()).append(entry)

    def forget_identities(self) -> None:
        """The broker knows nothing of us any more: what was delivered does not come again."""
        self._orphans = {}
        self._finished.clear()
        for entry in self._entries:
            entry.tag, entry.identity = None, None
