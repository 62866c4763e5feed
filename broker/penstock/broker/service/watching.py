"""What watchers of the metadata are to be told: names of what changed, never the changes.

A watcher is told what is true when it reads. So it suffices to remember which topics it has not
been told of since they changed: a slow one costs no more than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

KEPT_CHANGES: Final = 10_000
"""A client that comes again is told what changed since, if it is among so many changes."""

KEPT_NAMES: Final = 100_000
"""... and if they name no more topics than this, together."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What one change of the metadata, or several, touched."""

    index: int
    names: frozenset[str]
    internal: frozenset[str]
    """Names of the cluster's own topics, which only those see that ask for them."""
    brokers: bool

    def watched_by(self, topics: frozenset[str]) -> frozenset[str]:
        """What a watcher of these topics (none: of all that are not internal) sees of it."""
        return topics & (self.names | self.internal) if topics else self.names


class Recent:
    """What the last changes touched, bounded."""

    def __init__(self) -> None:
        self._changes: deque[Touched] = deque()
        self._names = 0
        self._floor: int | None = None  # Everything after this index is known; None: nothing is.

    def restart(self, index: int) -> None:
        """The whole picture was replaced."""
        self._changes.clear()
        self._names = 0
        self._floor = index

    def add(self, change: Touched) -> None:
        """Keep it, and forget the oldest beyond the bounds."""
        self._changes.append(change)
        self._names += len(change.names)
        while len(self._changes) > KEPT_CHANGES or self._names > KEPT_NAMES:
            oldest = self._changes.popleft()
            self._names -= len(oldest.names)
            self._floor = oldest.index

    def since(self, index: int) -> Touched | None:
        """What was touched after ``index``; None when that is not known any more."""
        if self._floor is None or index < self._floor:
            return None
        after = [change for change in self._changes if change.index > index]
        return Touched(
            after[-1].index if after else index,
            frozenset().union(*(change.names for change in after)),
            frozenset().union(*(change.internal for change in after)),
            any(change.brokers for change in after),
        )


class Watcher:
    """One stream: what it must be told. Memory is bounded by the names of the topics watched."""

    def __init__(self, topics: frozenset[str]) -> None:
        self.topics = topics  # None: all that are not internal.
        self._names: set[str] = set()
        self._brokers = False
        self._everything = False
        self._news = asyncio.Event()

    def offer(self, change: Touched) -> None:
        """This has changed; what is not watched of it is left out."""
        self._names.update(change.watched_by(self.topics))
        self._brokers = self._brokers or change.brokers
        if len(self._names) > KEPT_NAMES:
            self.offer_everything()
        elif self._names or self._brokers:
            self._news.set()

    def offer_everything(self) -> None:
        """It must be told everything anew."""
        self._names.clear()
        self._everything = True
        self._news.set()

    async def next(self) -> tuple[frozenset[str], bool] | None:
        """The names and whether brokers changed, since the last call; None for everything."""
        await self._news.wait()
        self._news.clear()
        names, brokers, everything = frozenset(self._names), self._brokers, self._everything
        self._names.clear()
        self._brokers = self._everything = False
        return None if everything else (names, brokers)
